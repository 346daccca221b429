"""What people set in the chart, a part at a time: alone and together they must make what Kubernetes takes."""

from __future__ import annotations

from typing import Any

Values = dict[str, Any]

PARTS: dict[str, Values] = {
    "nothing": {},
    "keys": {"apiKeys": {"existingSecret": "clients", "key": "keys.txt"}},
    "model": {
        "config": {
            "model": {"model": "Qwen/Qwen3-0.6B", "served-model-name": ["qwen", "chat"]},
            "scheduler": {"max-num-seqs": 16, "scheduling-policy": "fair"},
            "server": {"drain-timeout": 2.5, "max-queued-tokens": 5_000_000, "strict-params": True},
            "cache": {"kv-cache-memory": "512MiB"},
        },
        "huggingFace": {"existingSecret": "hub", "offline": True},
    },
    "gpu": {
        "gpu": {"enabled": True},
        "runtimeClassName": "nvidia",
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "nodeSelector": {"accelerator": "h200"},
        "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
    },
    "cache": {"persistence": {"enabled": True, "storageClass": "fast"}},
    "shared cache": {
        "persistence": {"enabled": True, "existingClaim": "models", "accessModes": ["ReadWriteMany"]}
    },
    "hpa": {"autoscaling": {"enabled": True}},
    "keda": {
        "autoscaling": {
            "enabled": True,
            "kind": "keda",
            "keda": {
                "prometheusAddress": "http://prometheus:9090",
                "triggerAuthentication": "p",
                "authModes": "bearer",
            },
        }
    },
    "monitoring": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "dashboards": {"enabled": True, "annotations": {"grafana_folder": "Models"}},
    },
    "closed": {
        "apiKeys": {"existingSecret": "clients"},
        "config": {"server": {"protect-metrics": True}},
        "serviceMonitor": {
            "enabled": True,
            "authorization": {"credentials": {"name": "clients", "key": "one"}},
        },
        "networkPolicy": {
            "enabled": True,
            "from": [{"namespaceSelector": {"matchLabels": {"team": "web"}}}],
            "extraEgress": [{"ports": [{"port": 4318}]}],
        },
    },
    "offline": {"networkPolicy": {"enabled": True, "allowDownloads": False}},
    "the rest": {
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccount": {"create": False},
        "podDisruptionBudget": {"enabled": False},
        "preStopSeconds": 0,
        "terminationGracePeriodSeconds": 300,
        "podAnnotations": {"a": "b"},
        "podLabels": {"c": "d"},
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "topologySpreadConstraints": [
            {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
        ],
        "extraEnv": [{"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://collector:4318"}],
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "service": {"type": "LoadBalancer", "port": 80, "annotations": {"e": "f"}},
        "podSecurityContext": {"fsGroup": None},
    },
}


def merged(*parts: Values) -> Values:
    """Values laid over each other, sections merged one level down."""
    whole: Values = {}
    for part in parts:
        for name, value in part.items():
            over = isinstance(value, dict) and isinstance(whole.get(name), dict)
            whole[name] = {**whole[name], **value} if over else value
    return whole
