{{/* Parts of the server's container. */}}

{{/* The environment wins over the file, so what the image sets there is set here as well or not at all. */}}
{{- define "slipstream.environment" -}}
- {name: SLIPSTREAM_HOST, value: "0.0.0.0"}
- {name: SLIPSTREAM_PORT, value: "8000"}
- {name: SLIPSTREAM_MODEL__DEVICE, value: {{ .Values.gpu.enabled | ternary "cuda" "cpu" }}}
{{- if .Values.huggingFace.offline }}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- with .Values.huggingFace.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.huggingFace.key }}}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* How its start, its health and its end are watched. */}}
{{- define "slipstream.life" -}}
startupProbe:
  httpGet: {path: /health/ready, port: http}
  periodSeconds: 2
  timeoutSeconds: 3
  failureThreshold: {{ div (add .Values.startupSeconds 1) 2 }}
readinessProbe:
  httpGet: {path: /health/ready, port: http}
  {{- toYaml .Values.probes.readiness | nindent 2 }}
livenessProbe:
  httpGet: {path: /health/live, port: http}
  {{- toYaml .Values.probes.liveness | nindent 2 }}
{{- if .Values.preStopSeconds }}
lifecycle:
  preStop: {exec: {command: [sleep, {{ .Values.preStopSeconds | quote }}]}}
{{- end }}
{{- end -}}

{{- define "slipstream.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- if .Values.gpu.enabled -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .Values.gpu.resourceName "1")) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
