# SPDX-License-Identifier: Apache-2.0
"""Training sparse models with transformers' Trainer."""

from __future__ import annotations

import statistics

import torch
from transformers import TrainerCallback

from .patch import _patched_modules, l1, patch, reinit_dead, stats, update


class SparsityCallback(TrainerCallback):
    """Adds the L1 term to the loss of a model that `twell.patch` has patched, keeps its layers'
    executions up to date, and adds activity to the Trainer's logs:

        l1               sum over neurons of |h|, mean over tokens and layers
        l1_coefficient   of the step
        nnz              active neurons per token, mean over layers
        dead             share of neurons that fired on no token since the last update: the last
                         log, reinitialisation, or step 1, 2, 4, 8 or 16
        nnz/<layer>, dead/<layer>, where by_layer is True

    Entries are in `trainer.state.log_history` and in what the Trainer prints. TensorBoard and other
    loggers of `report_to` come before callbacks that are given, and do not see them; use
    `report_to="none"` and `callbacks=[SparsityCallback(), TensorBoardCallback()]`. The loss that the
    Trainer logs includes the L1 term.

    coefficient: of the L1 term after the schedule.
    zero_steps, ramp_steps: steps without L1, and then of linear growth.
    reinit_every: steps, or 0: never. After so many, neurons that fired on none of their tokens move
        towards random ones (`twell.reinit_dead`), which waits for the GPU.
    reinit_strength, reinit_std: see `twell.reinit_dead`.
    """

    def __init__(
        self,
        coefficient: float = 2e-5,
        zero_steps: int = 0,
        ramp_steps: int = 0,
        reinit_every: int = 0,
        reinit_strength: float = 0.1,
        reinit_std: float = 0.02,
        by_layer: bool = False,
    ):
        self.coefficient = coefficient
        self.zero_steps = zero_steps
        self.ramp_steps = ramp_steps
        self.reinit_every = reinit_every
        self.reinit_strength = reinit_strength
        self.reinit_std = reinit_std
        self.by_layer = by_layer
        self._now = torch.zeros(())  # the coefficient of the step
        self._share = 1.0  # of a micro-batch in the step, where the loss is not a mean
        self._hook = None
        self._generator = None
        self._updated_at = -1  # step of the last update

    def coefficient_at(self, step: int) -> float:
        """The coefficient of a step, counted from 0."""
        ramped = step - self.zero_steps + 1
        if ramped <= 0:
            return 0.0
        if self.ramp_steps == 0:
            return self.coefficient
        return self.coefficient * min(ramped / self.ramp_steps, 1.0)

    def _add_term(self, model, args, kwargs, output):
        loss = output["loss"] if isinstance(output, dict) and "loss" in output else None
        if loss is None or not model.training or not torch.is_grad_enabled():
            return output
        # With a number of items the Trainer sums the micro-batches' losses instead of averaging.
        share = self._share if kwargs.get("num_items_in_batch") is not None else 1.0
        output["loss"] = loss + share * self._now * l1(model).to(loss.device)
        return output

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        if not _patched_modules(model):
            patch(model, automatic=False)
        if not _patched_modules(model):
            raise ValueError("no layer of the model runs sparse; call twell.relufy(model) first")
        automatic = model.__dict__.pop("_twell_updates", None)
        if automatic is not None:
            automatic.remove()
        ranks = args.world_size if args.average_tokens_across_devices else 1
        self._share = 1.0 / (args.gradient_accumulation_steps * ranks)
        self._now = torch.zeros((), device=next(model.parameters()).device)
        self._generator = torch.Generator().manual_seed(args.seed)
        self._hook = model.register_forward_hook(self._add_term, with_kwargs=True)

    def on_step_begin(self, args, state, control, **kwargs):
        self._now.fill_(self.coefficient_at(state.global_step))

    def on_step_end(self, args, state, control, model=None, **kwargs):
        step = state.global_step
        early = step <= 16 and step & (step - 1) == 0
        reinit = self.reinit_every > 0 and step % self.reinit_every == 0
        if early or reinit:
            update(model)
            self._updated_at = step
        if reinit:
            reinit_dead(model, self.reinit_strength, self.reinit_std, self._generator)

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        if logs is None or "loss" not in logs:
            return
        if self._updated_at != state.global_step:
            update(model)
            self._updated_at = state.global_step
        layers = [layer for layer in stats(model) if layer.tokens]
        if not layers:
            return
        found = {
            "l1": statistics.mean(layer.l1_per_token for layer in layers),
            "l1_coefficient": self.coefficient_at(state.global_step - 1),
            "nnz": statistics.mean(layer.nnz_per_token for layer in layers),
            "dead": statistics.mean(layer.dead / layer.neurons for layer in layers),
        }
        if self.by_layer:
            for layer in layers:
                found[f"nnz/{layer.name}"] = layer.nnz_per_token
                found[f"dead/{layer.name}"] = layer.dead / layer.neurons
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)

    def on_train_end(self, args, state, control, **kwargs):
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
