{{/* What a schema cannot say: values that contradict each other. Included by configmap.yaml, so it always runs. */}}
{{- define "m3.validate" -}}
{{- $model := .Values.model }}
{{- $hasMany := or (gt (int .Values.replicas) 1) (include "m3.hasAutoscaler" .) (eq .Values.kind "LeaderWorkerSet") }}
{{- if and (eq $model.source "pvc") (not $model.pvc.claimName) }}
{{- fail "model.pvc.claimName: the claim that holds the checkpoint is required with model.source=pvc" }}
{{- end }}
{{- if and (eq $model.source "pvc") $hasMany (eq $model.pvc.accessMode "ReadWriteOnce") }}
{{- fail "model.pvc.accessMode: a ReadWriteOnce claim serves one pod; several replicas need ReadOnlyMany or ReadWriteMany" }}
{{- end }}
{{- if and (eq $model.source "download") $hasMany (eq $model.download.accessMode "ReadWriteOnce") }}
{{- fail "model.download.accessMode: a ReadWriteOnce claim serves one pod; several replicas need ReadWriteMany" }}
{{- end }}
{{- if and (eq $model.source "hostPath") (not $model.hostPath.path) }}
{{- fail "model.hostPath.path is required with model.source=hostPath" }}
{{- end }}
{{- if and (eq $model.source "download") (not $model.download.revision) }}
{{- fail "model.download.revision: a full commit id is required with model.source=download" }}
{{- end }}
{{- if eq $model.source "image" }}
{{- if not $model.image.reference }}
{{- fail "model.image.reference is required with model.source=image" }}
{{- end }}
{{- if semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version }}
{{- fail "model.source=image needs image volumes: Kubernetes 1.33 or later" }}
{{- end }}
{{- end }}
{{- if and (eq (int .Values.rollout.maxSurge) 0) (eq (int .Values.rollout.maxUnavailable) 0) }}
{{- fail "rollout: maxSurge and maxUnavailable cannot both be 0" }}
{{- end }}
{{- if le (include "m3.mebibytes" .Values.resources.limits.memory | int64) (include "m3.mebibytes" .Values.shm.size | int64) }}
{{- fail "resources.limits.memory must exceed shm.size: pages of /dev/shm count as the pod's memory" }}
{{- end }}
{{- if and .Values.settings.media_slab_bytes (ge (div (int64 .Values.settings.media_slab_bytes) 1048576) (include "m3.mebibytes" .Values.shm.size | int64)) }}
{{- fail "shm.size must exceed settings.media_slab_bytes: decoded pictures lie in /dev/shm" }}
{{- end }}
{{- if and .Values.gpu.resourceClaimTemplate (semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version) }}
{{- fail "gpu.resourceClaimTemplate needs Kubernetes 1.31 or later" }}
{{- end }}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.serviceMonitor.enabled }}
{{- fail "monitoring: podMonitor and serviceMonitor together would count everything twice" }}
{{- end }}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) }}
{{- fail "autoscaling.minReplicas exceeds autoscaling.maxReplicas" }}
{{- end }}
{{- if and .Values.httpRoute.enabled (not .Values.httpRoute.parentRefs) }}
{{- fail "httpRoute.parentRefs: name at least one gateway" }}
{{- end }}
{{- if and .Values.inferencePool.enabled (not .Values.inferencePool.endpointPicker.name) }}
{{- fail "inferencePool.endpointPicker.name is required" }}
{{- end }}
{{- end }}
