"""Runs a script on CPU processes through the code that Accelerate keeps for GPUs: FSDP2, HSDP, several machines.

    accelerate launch --config_file accelerate_configs/fsdp2.yaml tests/wrapper_cpu_as_gpu.py train.py ...

So the launcher files that ship are what is tested, with gloo in place of nccl. For tests only: it replaces what
Accelerate finds out about the machine, and nothing of what it then does.
"""

import os
import runpy
import sys
from functools import partialmethod, wraps

os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # Otherwise DDP would be told a GPU's number.

import accelerate
import torch
from accelerate.state import DistributedType, PartialState

BACKEND = ("gloo", DistributedType.MULTI_GPU) if "LOCAL_RANK" in os.environ else (None, DistributedType.NO)
PartialState._prepare_backend = lambda *_, **__: BACKEND


def without_cpu(init):
    @wraps(init)
    def wrapped(self, *args, **kwargs):
        init(self, *args, **kwargs | {"cpu": False})
        if self.mixed_precision == "fp16":  # On a CPU, Accelerate would compute in float32, and without a scaler.
            self.native_amp = True
            options = self.scaler_handler.to_kwargs() if self.scaler_handler else {}
            self.scaler = torch.amp.GradScaler("cpu", **options)

    return wrapped


accelerate.Accelerator.__init__ = without_cpu(accelerate.Accelerator.__init__)

if os.environ.get("ACCELERATE_MIXED_PRECISION") == "fp8":  # A CPU multiplies what is rounded to float8 in float32.
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    Float8LinearConfig.__init__ = partialmethod(Float8LinearConfig.__init__, emulate=True)
    in_float8 = Float8Linear.forward

    def forward(self, states):
        """torchao itself asks for the autocast of GPUs only."""
        return in_float8(self, states.bfloat16() if torch.is_autocast_enabled("cpu") else states)

    Float8Linear.forward = forward

if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False  # In the place of gloo, it would compile code for shared memory.

if __name__ == "__main__":
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))  # As Python does for the script itself.
    runpy.run_path(sys.argv[0], run_name="__main__")
