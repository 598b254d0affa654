"""DeepSpeed's ZeRO-2 and ZeRO-3: its engine's own passes, gradient norm and checkpoints."""

import warnings
from collections.abc import Callable, Iterable

import torch
import transformers
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from samerun.config import Config
from samerun.data.batches import MicroBatch
from samerun.errors import UserError, require
from samerun.model.checks import probe_batch
from samerun.model.loss import add_metrics
from samerun.model.weights import fill_weights
from samerun.optim import is_fused
from samerun.parallel.layout import Layout, check_type_of_codes
from samerun.parallel.mesh import Parallelism
from samerun.parallel.state import full_tensor, scales_of_frozen


class DeepSpeed(Parallelism):
    """DeepSpeed's ZeRO-2 and ZeRO-3: the ranks divide gradients and optimizer state, and with ZeRO-3 the weights, too.

    Its engine computes the gradients. Its optimizer takes the place of ours, and has ours update the part of this rank,
    in float32. What a step is, and whether there is an update, is decided here as ever.
    """

    def __init__(self, config: Config, accelerator: Accelerator, layout: Layout, loss_of: Callable):
        super().__init__(config, accelerator, layout, loss_of)
        self.settings = accelerator.state.deepspeed_plugin.deepspeed_config
        self.stage = self.settings["zero_optimization"].get("stage", 0)
        # With ZeRO-3, transformers would otherwise divide the weights while it makes the model.
        transformers.integrations.deepspeed.unset_hf_deepspeed_config()
        warnings.filterwarnings("ignore", "`torch.distributed.* is deprecated", FutureWarning)

    def check(self) -> None:
        check_type_of_codes(self.config.model, self.accelerator.mixed_precision)
        muon = self.config.optim.name == "muon"
        require(not muon, "optim.name muon: needs whole matrices, and DeepSpeed shards them; use adamw, or DDP")
        require(self.stage in (2, 3), f"launch: zero_stage {self.stage} is not supported; use 2 or 3, or DDP")
        divides_more = self.layout.is_divided or self.layout.row_ranks > 1
        refused = {
            "sequence, context, tensor or pipeline parallelism": divides_more,
            "mixed_precision fp8": self.accelerator.mixed_precision == "fp8",
            "model.compile": self.config.model.compile != "none",
            "model.balance_experts": self.config.model.balance_experts > 0,
            "model.balance_loss": self.config.model.balance_loss > 0,
            "batch.max_micro_batch_size: auto": self.config.batch.max_micro_batch_size == "auto",
            "offloading of the weights, or to NVMe": self.offloads_much(),
        }
        for name, asked in refused.items():
            advice = "leave it out, or take accelerate_configs/fsdp2.yaml"
            require(not asked, f"launch: DeepSpeed cannot be combined with {name}; {advice}")
        ours = {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": 1,
            "gradient_clipping": self.config.optim.max_grad_norm,
            "optimizer": "auto",
            "scheduler": "auto",
        }
        for name, value in ours.items():
            found = self.settings.get(name, "auto")
            advice = "leave it out, because batch and optim in the config of the run decide it"
            require(found in ("auto", value), f"launch: {name} of DeepSpeed is {found}; {advice}")

    def offloads_much(self) -> bool:
        zero = self.settings["zero_optimization"]
        devices = [(zero.get(name) or {}).get("device", "none") for name in ("offload_optimizer", "offload_param")]
        return devices[0] not in ("none", "cpu") or devices[1] != "none"

    @property
    def passes(self) -> Callable:
        return self.run_engine

    def prepare(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer], forward_backward: Callable
    ) -> torch.nn.Module:
        device = self.accelerator.device
        self.batch = probe_batch(model, device)
        self.mesh = init_device_mesh(device.type, (self.accelerator.num_processes,))
        self.settings |= {
            "train_micro_batch_size_per_gpu": 1,  # DeepSpeed wants a number, and makes no use of it.
            "gradient_clipping": self.config.optim.max_grad_norm or 0.0,
            "communication_data_type": "fp32",
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_force_ds_cpu_optimizer": False,
        }
        fill_weights(model, torch.device("cpu"))  # Its engine divides a model that is whole.
        [self.optimizer] = optimizers
        require(is_fused(self.optimizer), "optim.name: DeepSpeed needs one optimizer that is fused; use adamw")
        model, _ = self.accelerator.prepare(model, self.optimizer)
        self.zero = model.optimizer
        self.zero.found_inf = None
        self.optimizer.register_step_pre_hook(self.pass_on_found_inf)
        optimizers[:] = [self.zero]
        self.step_without_update(model)  # Makes the optimizer's state, so that a checkpoint can be loaded into it.
        if self.stage == 2:  # DeepSpeed has noted where it is after the first group of weights, without the others.
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()
        return model

    def pass_on_found_inf(self, optimizer: torch.optim.Optimizer, *_) -> None:
        # With an offloaded optimizer it is on the GPU, and torch would not wait for its copy to the host.
        [updated, *_] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        optimizer.found_inf = self.zero.found_inf.to(updated.device)

    def step_without_update(self, model: torch.nn.Module) -> None:
        """Afterwards the weights that compute are those in float32 again, rounded."""
        self.run_engine(model, [self.batch], scale=0.0)
        self.forget_gradients([])

    def run_engine(
        self, model: torch.nn.Module, micro_batches: list[MicroBatch], scale: float
    ) -> dict[str, torch.Tensor]:
        """As accumulate(), but DeepSpeed has the gradients, and sums over the ranks in every micro-step."""
        metrics = {}
        for number, batch in enumerate(micro_batches, start=1):
            model.set_gradient_accumulation_boundary(number == len(micro_batches))
            loss, metrics_of_batch = self.loss_of(model, batch)
            model.backward(loss * (self.layout.averages_over * scale))  # DeepSpeed averages over the ranks.
            add_metrics(metrics, metrics_of_batch)
        return metrics

    def clip_gradients(self, parameters: list[torch.nn.Parameter], factor: float = 1.0) -> torch.Tensor:
        """Returns the norm only. DeepSpeed clips by the same norm in its step. The factor is 1: there is no fp16."""
        from deepspeed.runtime.utils import combine_grad_norm_groups

        norms = self.zero._get_norm_groups() if self.stage == 3 else [self.zero.scaled_global_norm()]
        return combine_grad_norm_groups(norms).to(self.accelerator.device)

    def norm_of_gradients(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        raise UserError("launch: DeepSpeed keeps gradients to itself, so nobody knows the norm of some; take FSDP2")

    def forget_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        if self.zero.found_inf is None:  # There was no update. Only in its step does DeepSpeed forget gradients.
            self.zero.found_inf = torch.ones((), device=self.accelerator.device)
            self.zero.step()
        self.zero.found_inf = None

    def state_to_save(self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
        """A copy. DeepSpeed divides flat tensors, and torch's checkpoints want rows: each rank has some of each one."""
        state, scales = {}, scales_of_frozen(model.module)
        for name, value in model.module.state_dict(keep_vars=True).items():
            if not isinstance(value, torch.nn.Parameter) and not name.startswith(scales):
                state[f"model.{name}"] = value
        for name, parameter, key in self.parts(model, optimizers):
            whole = self.read(parameter, key)
            placement = Shard(0) if whole.ndim else Replicate()
            state[name] = distribute_tensor(whole, self.mesh, [placement], src_data_rank=None).clone()
        return state

    def load_state(
        self, state: dict[str, torch.Tensor], model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> None:
        parts = list(self.parts(model, optimizers))
        counts = {full_tensor(state[name]).item() if name in state else 0.0 for name, _, key in parts if key == "step"}
        refusal = "run.resume: some weights had more updates than others, and DeepSpeed counts them together"
        require(len(counts) < 2, f"{refusal}; continue with another launcher file")
        for name, parameter, key in parts:
            if name in state:
                self.write(parameter, key, full_tensor(state[name]))
        self.step_without_update(model)

    def parts(
        self, model: torch.nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> Iterable[tuple[str, torch.nn.Parameter, str]]:
        """What is trained: its name in a checkpoint, the parameter, and a key of the optimizer, "" for the weight."""
        keys = list(next(iter(self.optimizer.state.values()))) if optimizers else []
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad:
                yield f"model.{name}", parameter, ""
                for key in keys:
                    yield f"optimizer.state.{name}.{key}", parameter, key

    def read(self, parameter: torch.nn.Parameter, key: str) -> torch.Tensor:
        """One of parts(), whole and in float32. All ranks must call it."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if not key:
            return safe_get_full_fp32_param(parameter)
        of_all = next(iter(self.optimizer.state.values()))[key]  # The count of the updates, or some part.
        return of_all if of_all.ndim == 0 else safe_get_full_optimizer_state(parameter, key)

    def write(self, parameter: torch.nn.Parameter, key: str, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        if not key:
            safe_set_full_fp32_param(parameter, value)
        elif value.ndim == 0:
            for state in self.optimizer.state.values():
                state[key].copy_(value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    def weights_to_export(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
        """As ever, but with ZeRO-3 each has the place of a parameter without numbers."""
        state = model.state_dict(keep_vars=True)
        return {name: weight for name, weight in state.items() if name not in model.all_tied_weights_keys}

    def gather_weight(
        self, name: str, weight: torch.Tensor, dtype: torch.dtype, ranks: set[int]
    ) -> torch.Tensor | None:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([weight]):  # With ZeRO-3, frozen weights are divided, too.
            whole = self.read(weight, "") if weight.requires_grad else weight.detach()
            return whole.to(dtype).cpu() if self.layout.rank in ranks else None
