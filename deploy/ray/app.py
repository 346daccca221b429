"""build: the Serve application. `serve run deploy.ray.app:build model=... replicas=2 max-num-seqs=64`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from starlette.types import ASGIApp

from config import ServerSettings
from deploy.ray.front import build_front
from deploy.ray.options import RayOptions, read_options
from deploy.ray.replica import EngineReplica
from deploy.ray.router import AffinityRouter
from deploy.ray.scaling import QueueDepthPolicy

ENGINE, FRONT = "engine", "front"

NO_ACCESS_LOG = {"enable_access_log": False}  # the engines log requests themselves
STATS_PERIOD_S = 2.0
HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 3.0, 10.0
DRAIN_MARGIN_S = 4.0  # for what ends with the drain; a front has it twice, to tell of engines that ran out
LOAD_SHARE = 0.75  # of the seats: what an engine should have to do before another is started


def build(args: dict[str, Any]) -> Application:
    """The application for `args`, see `read_options`. Raises SettingsError."""
    return assemble(read_options(args))


def assemble(options: RayOptions) -> Application:
    """Fronts before engines, as many of each as `options` say."""
    server = options.settings.server
    patience_s = server.drain_timeout + DRAIN_MARGIN_S
    engines = serve.deployment(EngineReplica, name=ENGINE).options(
        **_number_of_engines(options),
        max_ongoing_requests=options.max_ongoing_requests,
        max_queued_requests=options.max_unassigned_requests,
        graceful_shutdown_timeout_s=patience_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
        logging_config=NO_ACCESS_LOG,
        request_router_config=RequestRouterConfig(
            request_router_class=AffinityRouter,
            request_router_kwargs={"spill": options.spill_requests},
            request_routing_stats_period_s=STATS_PERIOD_S,
        ),
    )
    fronts = serve.deployment(serve.ingress(_front_factory(server))(), name=FRONT).options(
        num_replicas=options.fronts,
        max_ongoing_requests=server.max_connections,
        graceful_shutdown_timeout_s=patience_s + DRAIN_MARGIN_S,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        ray_actor_options={"num_cpus": 0},
        logging_config=NO_ACCESS_LOG,
    )
    return fronts.bind(engines.bind(options.settings, options.faults))


def _front_factory(server: ServerSettings) -> Callable[[], ASGIApp]:
    def make_front() -> ASGIApp:
        return build_front(server, serve.get_deployment_handle(ENGINE))

    return make_front


def _number_of_engines(options: RayOptions) -> Mapping[str, Any]:
    """A number, or limits and the policy between them."""
    if not options.scales:
        return {"num_replicas": options.replicas}
    target = max(1.0, LOAD_SHARE * options.seats)
    scaling = AutoscalingConfig(
        min_replicas=options.replicas,
        max_replicas=options.max_replicas,
        policy=AutoscalingPolicy(policy_function=QueueDepthPolicy, policy_kwargs={"target": target}),
    )
    return {"autoscaling_config": scaling}
