{{/* What a replica is to have, as autoscalers compare it: metric, target, and whether it is a share of 1. */}}
{{- define "slipstream.targets" -}}
{{- $targets := .Values.autoscaling.targets -}}
{{- $running := div (mul 3 (int (dig "scheduler" "max-num-seqs" 64 .Values.config) | default 64)) 4 -}}
- {metric: slipstream_num_requests_running, target: {{ kindIs "invalid" $targets.requestsRunning | ternary (max 1 $running) $targets.requestsRunning }}}
- {metric: slipstream_num_requests_waiting, target: {{ $targets.requestsWaiting }}}
- {metric: slipstream_kv_cache_usage_ratio, target: {{ $targets.kvCacheUsage }}}
{{- end -}}
