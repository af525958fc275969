{{/*
The one pod template, of the Deployment, and of leader and workers of a LeaderWorkerSet: (dict "root" $ "role" "server"|"worker").
A worker answers no HTTP and is never a target of the Service.
*/}}
{{- define "m3.podTemplate" -}}
{{- $root := .root -}}
{{- $values := .root.Values -}}
{{- $isServer := eq .role "server" -}}
{{- $isDownload := eq $values.model.source "download" -}}
metadata:
  labels:
    {{- include "m3.labels" (list $root "server") | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "m3.settings" $root | sha256sum }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "m3.serviceAccountName" $root }}
  automountServiceAccountToken: false
  # A Service named "m3" would otherwise put variables like M3_PORT into the pod, which the server refuses as unknown settings.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "m3.gracePeriodSeconds" $root }}
  securityContext:
    {{- include "m3.podSecurityContext" $root | nindent 4 }}
  {{- with $values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or (eq $values.kind "Deployment") $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- if eq $values.kind "Deployment" }}
    - maxSkew: 1
      topologyKey: topology.kubernetes.io/zone
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "m3.selector" (list $root "server") | nindent 10 }}
      matchLabelKeys: [pod-template-hash]
    {{- end }}
    {{- with $values.topologySpreadConstraints }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $values.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $values.gpu.resourceClaimTemplate }}
  resourceClaims:
    - name: gpus
      resourceClaimTemplateName: {{ . }}
  {{- end }}
  {{- if $isDownload }}
  initContainers:
    - name: wait-for-model
      image: {{ include "m3.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: [python, /etc/m3/download/download.py, wait, /models]
      env:
        {{- include "m3.downloadEnv" $root | nindent 8 }}
      securityContext:
        {{- include "m3.securityContext" $root | nindent 8 }}
      resources:
        requests: {cpu: 100m, memory: 128Mi}
        limits: {cpu: "1", memory: 256Mi}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: model, mountPath: /models, readOnly: true}
        - {name: download, mountPath: /etc/m3/download, readOnly: true}
  {{- end }}
  containers:
    - name: server
      image: {{ include "m3.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      # The image's entry point is an init that passes SIGTERM on to the server alone.
      args:
        - uvicorn
        - server.main:app
        - --host=0.0.0.0
        - --port=8000
      envFrom:
        - configMapRef:
            name: {{ include "m3.fullname" $root }}-settings
      env:
        {{- if eq $values.kind "LeaderWorkerSet" }}
        - name: M3_NUM_NODES
          value: {{ int64 $values.multiNode.size | quote }}
        - name: M3_NODE_RANK
          valueFrom:
            fieldRef:
              fieldPath: metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']
        - name: M3_LEADER_ADDRESS
          value: $(LWS_LEADER_ADDRESS):{{ int64 $values.multiNode.rendezvousPort }}
        {{- end }}
        # The root file system is read-only: everything that writes finds its folder here.
        - {name: HOME, value: /home/m3}
        - {name: TMPDIR, value: /tmp}
        - {name: XDG_CACHE_HOME, value: /home/m3/.cache}
        - {name: TRITON_CACHE_DIR, value: /home/m3/.cache/triton}
        - {name: TORCHINDUCTOR_CACHE_DIR, value: /home/m3/.cache/inductor}
        - {name: CUDA_CACHE_PATH, value: /home/m3/.cache/cuda}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- range $name, $value := $values.extraEnv }}
        - {name: {{ $name }}, value: {{ include "m3.scalar" $value | quote }}}
        {{- end }}
      {{- if $isServer }}
      ports:
        - {name: http, containerPort: 8000, protocol: TCP}
        {{- if $values.adminPort.enabled }}
        - {name: admin, containerPort: {{ int64 $values.adminPort.port }}, protocol: TCP}
        {{- end }}
      startupProbe:
        httpGet: {path: /readyz, port: {{ include "m3.adminPortName" $root }}}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: {{ divf $values.startup.budgetSeconds 10 | ceil | int64 }}
      readinessProbe:
        httpGet: {path: /readyz, port: {{ include "m3.adminPortName" $root }}}
        {{- toYaml $values.probes.readiness | nindent 8 }}
      livenessProbe:
        httpGet: {path: /livez, port: {{ include "m3.adminPortName" $root }}}
        {{- toYaml $values.probes.liveness | nindent 8 }}
      {{- end }}
      lifecycle:
        preStop:
          sleep:
            seconds: {{ int64 $values.drain.preStopSeconds }}
      resources:
        requests:
          {{- toYaml $values.resources.requests | nindent 10 }}
          {{- if and $values.gpu.count (not $values.gpu.resourceClaimTemplate) }}
          {{ $values.gpu.resourceName }}: {{ int64 $values.gpu.count }}
          {{- end }}
        limits:
          {{- toYaml $values.resources.limits | nindent 10 }}
          {{- if and $values.gpu.count (not $values.gpu.resourceClaimTemplate) }}
          {{ $values.gpu.resourceName }}: {{ int64 $values.gpu.count }}
          {{- end }}
        {{- if $values.gpu.resourceClaimTemplate }}
        claims:
          - name: gpus
        {{- end }}
      securityContext:
        {{- include "m3.securityContext" $root | nindent 8 }}
      terminationMessagePolicy: FallbackToLogsOnError
      volumeMounts:
        - {name: model, mountPath: /models, readOnly: true}
        - {name: shm, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        - {name: home, mountPath: /home/m3}
        {{- if $values.compileCacheClaim }}
        - {name: compile-cache, mountPath: /home/m3/.cache}
        {{- end }}
        {{- if $values.auth.existingSecret }}
        # The whole folder, not a subPath: a rotated Secret then reaches the running pod.
        - {name: keys, mountPath: /etc/m3/keys, readOnly: true}
        {{- end }}
  volumes:
    - name: model
      {{- if eq $values.model.source "hostPath" }}
      hostPath: {path: {{ $values.model.hostPath.path }}, type: Directory}
      {{- else if eq $values.model.source "image" }}
      image: {reference: {{ $values.model.image.reference }}, pullPolicy: {{ $values.model.image.pullPolicy }}}
      {{- else }}
      persistentVolumeClaim: {claimName: {{ include "m3.modelClaim" $root }}, readOnly: true}
      {{- end }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $values.shm.size }}}
    - name: tmp
      emptyDir: {sizeLimit: {{ $values.scratch.tmpSize }}}
    - name: home
      emptyDir: {sizeLimit: {{ $values.scratch.homeSize }}}
    {{- with $values.compileCacheClaim }}
    - name: compile-cache
      persistentVolumeClaim: {claimName: {{ . }}}
    {{- end }}
    {{- with $values.auth.existingSecret }}
    - name: keys
      secret: {secretName: {{ . }}, defaultMode: 0440}
    {{- end }}
    {{- if $isDownload }}
    - name: download
      configMap: {name: {{ include "m3.fullname" $root }}-download}
    {{- end }}
{{- end }}
