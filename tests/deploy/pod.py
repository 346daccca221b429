"""A pod of the manifest as Docker or Podman runs it: same limits, mounts and words, without Kubernetes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from deploy.kubernetes.build import MANIFEST


def read_manifest() -> dict[str, dict[str, Any]]:
    """The manifest's objects by their kind; there is one of each."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8"))}


def server_container(objects: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The container of the server in its pod."""
    [container] = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(container)


def engine_options(objects: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """What `docker run` has to be told; the ConfigMap's files are written into `folder`."""
    container = server_container(objects)
    confined, limits = container["securityContext"], container["resources"]["limits"]
    options = [f"--cap-drop={name}" for name in confined["capabilities"]["drop"]]
    options += ["--read-only"] * confined["readOnlyRootFilesystem"]
    options += ["--security-opt=no-new-privileges"] * (not confined["allowPrivilegeEscalation"])
    options += [f"--env={each['name']}={each['value']}" for each in container["env"]]
    options += [f"--cpus={limits['cpu']}", f"--memory={limits['memory'].removesuffix('i').lower()}"]
    folder.chmod(0o755)
    for name, text in objects["ConfigMap"]["data"].items():
        (folder / name).write_text(text, encoding="utf-8")
    volumes = {each["name"]: each for each in objects["Deployment"]["spec"]["template"]["spec"]["volumes"]}
    for mount in container["volumeMounts"]:
        path = mount["mountPath"]
        options.append(
            f"--tmpfs={path}" if "emptyDir" in volumes[mount["name"]] else f"--volume={folder}:{path}:ro"
        )
    return options
