{{/* The name of everything, and the labels by which it is found. */}}
{{- define "slipstream.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "slipstream.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "slipstream.name" . -}}
{{- contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* A part of the release, such as its cache; room is left for the part. */}}
{{- define "slipstream.part" -}}
{{- $whole := include "slipstream.fullname" .root | trunc (int (sub 62 (len .part))) | trimSuffix "-" -}}
{{- printf "%s-%s" $whole .part -}}
{{- end -}}

{{- define "slipstream.selectorLabels" -}}
app.kubernetes.io/name: {{ include "slipstream.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "slipstream.labels" -}}
{{ include "slipstream.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "slipstream.serviceAccountName" -}}
{{- .Values.serviceAccount.create | ternary (include "slipstream.fullname" .) "default" | default | coalesce .Values.serviceAccount.name -}}
{{- end -}}

{{- define "slipstream.image" -}}
{{- $tag := .Values.gpu.enabled | ternary (printf "%s-cuda" .Chart.AppVersion) .Chart.AppVersion -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default $tag) -}}
{{- end -}}

{{- define "slipstream.claimName" -}}
{{- .Values.persistence.existingClaim | default (include "slipstream.part" (dict "root" . "part" "models")) -}}
{{- end -}}

{{/* The server's TOML file. JSON's texts, numbers, booleans and lists of texts are TOML's. */}}
{{- define "slipstream.config" -}}
{{- range $section, $settings := .Values.config -}}
[{{ $section }}]
{{ range $key, $value := $settings -}}
{{ $key }} = {{ toJson $value }}
{{ end -}}
{{- end -}}
{{- end -}}

{{/* The keys' file in the container; "" when the API is open. */}}
{{- define "slipstream.keyFile" -}}
{{- if .Values.apiKeys.existingSecret -}}
/etc/slipstream/keys/{{ .Values.apiKeys.key }}
{{- end -}}
{{- end -}}
