"""Which platforms is this machine part of? Looked up in files: asking the network takes long."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from keras_safe_ckpt.preemption import aws, azure, gcp
from keras_safe_ckpt.preemption.notices import Watcher

_CLOUDS = {
    "gcp": (gcp.gcp_watchers, gcp.ENDPOINT_VARIABLE),
    "aws": (aws.aws_watchers, aws.ENDPOINT_VARIABLE),
    "azure": (azure.azure_watchers, azure.ENDPOINT_VARIABLE),
}
#: On each machine of Azure, and on no other virtual machine of Microsoft's making.
_AZURE_ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"


def find_platforms(
    root: str | os.PathLike[str] = "/", environment: Mapping[str, str] | None = None
) -> list[str]:
    """Those of ``"gcp"``, ``"aws"``, ``"azure"`` and ``"slurm"`` that this machine belongs to.

    The firmware names the cloud; so does a variable with the address of its metadata service.
    """
    environment = os.environ if environment is None else environment
    vendor = _read(root, "sys/class/dmi/id/sys_vendor")
    product = _read(root, "sys/class/dmi/id/product_name")
    asset_tag = _read(root, "sys/class/dmi/id/chassis_asset_tag")
    found = {
        "gcp": product in ("Google", "Google Compute Engine"),
        # Older machines, under Xen, have it in the UUID only.
        "aws": vendor == "Amazon EC2"
        or _read(root, "sys/hypervisor/uuid").lower().startswith("ec2"),
        "azure": vendor == "Microsoft Corporation" and asset_tag == _AZURE_ASSET_TAG,
    }
    names = [
        name
        for name, (_, variable) in _CLOUDS.items()
        if found[name] or environment.get(variable, "").strip()
    ]
    return [*names, "slurm"] if environment.get("SLURM_JOB_ID") else names


def cloud_watchers(names: Iterable[str], *, interval_seconds: float = 1.0) -> list[Watcher]:
    """The watchers of these clouds. SLURM needs none: it sends signals.

    ::

        cloud_watchers(find_platforms())
    """
    watchers: list[Watcher] = []
    for name in names:
        if name in _CLOUDS:
            watchers += _CLOUDS[name][0](interval_seconds=interval_seconds)
        elif name != "slurm":
            raise ValueError(f"Expected platforms out of {[*_CLOUDS, 'slurm']}. Received: {name!r}")
    return watchers


def _read(root: str | os.PathLike[str], path: str) -> str:
    try:
        return (Path(root) / path).read_text(errors="replace").strip()
    except OSError:
        return ""
