"""How much of what the devices can do a run does: model FLOPs utilization, as PaLM defines it (arXiv:2204.02311, app. B).

Model FLOPs of a step / seconds of a step / (devices x peak FLOP/s of a device in bfloat16). Model FLOPs (models/flops.py)
count the rows of a batch at full length, padding included, and no recomputation.
"""

from collections.abc import Mapping

import jax

from synthesizer_jax.models.config import ModelConfig
from synthesizer_jax.models.flops import training_flops

# FLOP/s of one JAX device in bfloat16 with float32 accumulation, dense, by jax.Device.device_kind. TPUs: "Peak compute per
# chip" on cloud.google.com/tpu/docs/<version>, halved where a chip is two devices (v2, v3, TPU7x); GPUs: NVIDIA's data
# sheets, tensor cores without sparsity.
PEAK_FLOPS = {
    "TPU v2": 45e12 / 2,
    "TPU v3": 123e12 / 2,
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 2307e12 / 2,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-PCIE-40GB": 312e12,
    "NVIDIA A100 80GB PCIe": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA GH200 480GB": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}


def check_peak(peak_flops_per_device: float | None) -> None:
    """ValueError unless it is None or a positive number."""
    peak = peak_flops_per_device
    if peak is not None and (isinstance(peak, bool) or not isinstance(peak, (int, float)) or not peak > 0):
        raise ValueError(
            f"peak_flops_per_device: expected a number of FLOP/s > 0, such as 197e12, or None, got {peak!r}"
        )


def full_use(
    config: ModelConfig,
    task_feature_lengths: Mapping[str, int],
    batch_size: int,
    mesh: jax.sharding.Mesh,
    peak_flops_per_device: float | None = None,
) -> float | None:
    """Seconds that a step would take if the devices did nothing but its model FLOPs, at their peak.

    peak_flops_per_device: None: as the table has it. Returns None where neither says it, as for a CPU.
    """
    peak = peak_flops_per_device or PEAK_FLOPS.get(mesh.devices.flat[0].device_kind)
    if peak is None:
        return None
    return batch_size * training_flops(config, task_feature_lengths) / (mesh.devices.size * peak)
