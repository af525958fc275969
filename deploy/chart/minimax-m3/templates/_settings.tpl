{{/* The server's variables. A name that the server does not know ends it at start. */}}
{{- define "m3.settings" -}}
M3_MODEL: {{ include "m3.modelDir" . | quote }}
M3_SERVED_MODEL_NAME: {{ .Values.model.servedName | quote }}
M3_DEVICE: {{ ternary "cpu" "cuda" (eq (int .Values.gpu.count) 0) | quote }}
M3_ENGINE_START_TIMEOUT_S: {{ int64 .Values.startup.budgetSeconds | quote }}
M3_DRAIN_TIMEOUT_S: {{ int64 .Values.drain.drainSeconds | quote }}
{{- range $name, $value := .Values.settings }}
M3_{{ upper $name }}: {{ include "m3.scalar" $value | quote }}
{{- end }}
{{- if .Values.adminPort.enabled }}
M3_ADMIN_PORT: {{ int64 .Values.adminPort.port | quote }}
M3_ADMIN_HOST: "0.0.0.0"
{{- end }}
{{- if gt (int .Values.gpu.count) 1 }}
M3_TENSOR_PARALLEL_SIZE: {{ mul (int64 .Values.gpu.count) (ternary (int64 .Values.multiNode.size) 1 (eq .Values.kind "LeaderWorkerSet")) | quote }}
{{- end }}
{{- if .Values.auth.existingSecret }}
M3_API_KEYS_FILE: {{ printf "/etc/m3/keys/%s" .Values.auth.key | quote }}
{{- end }}
{{- end }}
