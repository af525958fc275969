#!/usr/bin/env bash
# Tries on a real cluster what cannot be tried without one: install, readiness, helm tests, a drain under load, an upgrade.
#
# cluster-smoke.sh NAMESPACE RELEASE VALUES-FILE. Needs kubectl, helm and curl, and rights in the namespace, which must exist.
# It leaves the release installed. Nothing here has been run on a cluster yet.
set -euo pipefail

[ $# -eq 3 ] || { echo "usage: $0 NAMESPACE RELEASE VALUES-FILE" >&2; exit 2; }
namespace=$1 release=$2 values=$3
chart=$(cd "$(dirname "$0")/chart/minimax-m3" && pwd)
selector=app.kubernetes.io/instance=$release,app.kubernetes.io/component=server
work=$(mktemp -d)
children=()
finish() {
  for child in "${children[@]}"; do kill "$child" 2>/dev/null || true; done
  rm -rf "$work"
}
trap finish EXIT

echo "install, and wait for readiness"
helm upgrade --install "$release" "$chart" -n "$namespace" -f "$values"
kubectl -n "$namespace" wait --for=condition=Ready pod -l "$selector" --timeout=90m

echo "helm test"
helm test "$release" -n "$namespace" --logs

echo "a stream in flight survives the deletion of its pod"
pod=$(kubectl -n "$namespace" get pod -l "$selector" -o jsonpath='{.items[0].metadata.name}')
kubectl -n "$namespace" port-forward "pod/$pod" 18000:8000 >"$work/forward" 2>&1 &
children+=($!)
until curl -sf http://127.0.0.1:18000/readyz >/dev/null; do sleep 1; done
body='{"stream": true, "max_tokens": 2000, "ignore_eos": true, "messages": [{"role": "user", "content": "Tell a long story."}]}'
curl -sN http://127.0.0.1:18000/v1/chat/completions -H 'content-type: application/json' -d "$body" >"$work/stream" &
stream=$!
until grep -q '"content"' "$work/stream"; do sleep 1; done
kubectl -n "$namespace" delete pod "$pod" --wait=false
wait "$stream"
tail -n 3 "$work/stream" | grep -q 'data: \[DONE\]' || { echo "the stream was cut" >&2; exit 1; }

echo "an upgrade that changes a setting replaces the pods and becomes ready"
helm upgrade "$release" "$chart" -n "$namespace" -f "$values" --set settings.max_num_seqs=63
kubectl -n "$namespace" rollout status "$(kubectl -n "$namespace" get deploy -l "app.kubernetes.io/instance=$release" -o name)" --timeout=90m
echo "rollback"
helm rollback "$release" -n "$namespace"
kubectl -n "$namespace" wait --for=condition=Ready pod -l "$selector" --timeout=90m
echo "all passed"
