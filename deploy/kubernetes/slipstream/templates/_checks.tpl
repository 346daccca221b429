{{/* What no schema can see because it takes two values. Each refusal says which value to change. */}}

{{/* Seconds from the start of a pod's end to its kill: waiting, draining, and 10 for the last events. */}}
{{- define "slipstream.graceSeconds" -}}
{{- $drain := dig "server" "drain-timeout" 8 .Values.config -}}
{{- $needed := add .Values.preStopSeconds (ceil $drain | int) 10 -}}
{{- $given := .Values.terminationGracePeriodSeconds -}}
{{- if and (not (kindIs "invalid" $given)) (lt (int $given) (int $needed)) -}}
{{- fail (printf "terminationGracePeriodSeconds is %v: streams would be cut; preStopSeconds (%v) + config.server.drain-timeout (%v) + 10 make %v" $given .Values.preStopSeconds $drain $needed) -}}
{{- end -}}
{{- kindIs "invalid" $given | ternary $needed $given | int -}}
{{- end -}}

{{/* "true" where only pods of one node can have the volume. */}}
{{- define "slipstream.isOnOneNode" -}}
{{- $modes := .Values.persistence.accessModes -}}
{{- if and .Values.persistence.enabled (not (has "ReadWriteMany" $modes)) (not (has "ReadOnlyMany" $modes)) -}}
true
{{- end -}}
{{- end -}}

{{- define "slipstream.checks" -}}
{{- $several := or .Values.autoscaling.enabled (gt (int .Values.replicaCount) 1) -}}
{{- if and $several (include "slipstream.isOnOneNode" .) -}}
{{- fail (printf "persistence.accessModes is %v: several replicas cannot share that volume; use ReadWriteMany, or persistence.enabled=false" .Values.persistence.accessModes) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- fail (printf "autoscaling.minReplicas (%v) is above autoscaling.maxReplicas (%v)" .Values.autoscaling.minReplicas .Values.autoscaling.maxReplicas) -}}
{{- end -}}
{{- if and .Values.autoscaling.enabled (eq .Values.autoscaling.kind "keda") (not .Values.autoscaling.keda.prometheusAddress) -}}
{{- fail "autoscaling.keda.prometheusAddress is empty: KEDA asks Prometheus for the queue" -}}
{{- end -}}
{{- $isProtected := dig "server" "protect-metrics" false .Values.config -}}
{{- if and .Values.serviceMonitor.enabled $isProtected (not .Values.serviceMonitor.authorization) -}}
{{- fail "config.server.protect-metrics is true: Prometheus needs a key in serviceMonitor.authorization" -}}
{{- end -}}
{{- if and $isProtected (not .Values.apiKeys.existingSecret) -}}
{{- fail "config.server.protect-metrics is true, but apiKeys.existingSecret names no keys" -}}
{{- end -}}
{{- end -}}
