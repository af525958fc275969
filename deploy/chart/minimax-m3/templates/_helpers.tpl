{{/* Names, labels, and numbers that several resources must agree on. */}}

{{- define "m3.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{/* At most 40 characters: suffixes and the hashes that controllers add must fit into 63. */}}
{{- define "m3.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains (include "m3.name" .) .Release.Name -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else -}}
{{- $name := include "m3.name" . -}}
{{ .Release.Name | trunc (sub 39 (len $name) | int) | trimSuffix "-" }}-{{ $name }}
{{- end }}
{{- end }}

{{/* What never changes over a release's life; (list root component). */}}
{{- define "m3.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ include "m3.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Pods that answer requests: of a group of pods only the leader does. */}}
{{- define "m3.servingSelector" -}}
{{ include "m3.selector" (list . "server") }}
{{- if eq .Values.kind "LeaderWorkerSet" }}
leaderworkerset.sigs.k8s.io/worker-index: "0"
{{- end }}
{{- end }}

{{- define "m3.labels" -}}
{{ include "m3.selector" . }}
{{- $root := index . 0 }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 }}
{{- end }}

{{- define "m3.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{ default (include "m3.fullname" .) .Values.serviceAccount.name }}
{{- else -}}
{{ default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "m3.image" -}}
{{- with .Values.image -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ default $.Chart.AppVersion .tag }}{{ end }}
{{- end }}
{{- end }}

{{/* Port of probes and metrics. */}}
{{- define "m3.adminPortName" -}}
{{ ternary "admin" "http" .Values.adminPort.enabled }}
{{- end }}

{{- define "m3.gracePeriodSeconds" -}}
{{ add .Values.drain.preStopSeconds .Values.drain.drainSeconds .Values.drain.teardownSeconds }}
{{- end }}

{{/* Kubernetes' own default of 600 would call a rollout failed while the weights are still being read. */}}
{{- define "m3.progressDeadlineSeconds" -}}
{{ add .Values.startup.initSeconds .Values.startup.budgetSeconds 300 }}
{{- end }}

{{- define "m3.hasAutoscaler" -}}
{{ ne .Values.autoscaling.mode "none" | ternary "true" "" }}
{{- end }}

{{- define "m3.workload" -}}
apiVersion: {{ ternary "apps/v1" "leaderworkerset.x-k8s.io/v1" (eq .Values.kind "Deployment") }}
kind: {{ .Values.kind }}
name: {{ include "m3.fullname" . }}
{{- end }}

{{/* Folder of the checkpoint in the container. A download lies under its revision. */}}
{{- define "m3.modelDir" -}}
{{- $part := ternary .Values.model.download.revision .Values.model.subPath (eq .Values.model.source "download") -}}
/models{{ if $part }}/{{ $part }}{{ end }}
{{- end }}

{{- define "m3.modelClaim" -}}
{{ ternary (printf "%s-model" (include "m3.fullname" .)) .Values.model.pvc.claimName (eq .Values.model.source "download") }}
{{- end }}

{{/* Helm reads every number as a float: 268435456 must not become 2.68435456e+08. */}}
{{- define "m3.scalar" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- end }}

{{/* A quantity of memory in MiB, to compare two of them. */}}
{{- define "m3.mebibytes" -}}
{{- if hasSuffix "Ti" . }}{{ mul (trimSuffix "Ti" . | int64) 1048576 }}
{{- else if hasSuffix "Gi" . }}{{ mul (trimSuffix "Gi" . | int64) 1024 }}
{{- else }}{{ trimSuffix "Mi" . | int64 }}
{{- end }}
{{- end }}

{{- define "m3.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.user.uid }}
runAsGroup: {{ int64 .Values.user.gid }}
fsGroup: {{ int64 .Values.user.gid }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "m3.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}
