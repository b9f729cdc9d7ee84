"""The update: gradients summed over microbatches, one AdamW step, nothing applied that is not finite.

The learner knows the model only as `log_probs(params, batch)`, so that tests train a toy and a reader sees where RL ends. Three functions
do the work, each compiled once for a shape whatever the number of microbatches: scores of a microbatch, its gradient added to a donated accumulator,
and the step. Between the last two the host looks at loss and gradient: a step that is not finite raises `NonFiniteUpdate` while the old state is
still whole.

π_old is the trainer's own: `old_log_probs` runs before the first update of a rollout step, through the same log-prob function (temperature and
banned ids included) as the update, so that the ratio is 1 up to the compiler's rounding where nothing has changed yet. The log-probs of a frozen
reference policy come from the same function.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from intraskill.grpo.loss import DeviceBatch, Objective, Scores, mean_metrics
from intraskill.types import Batch, InputError

LogProbsFn = Callable[[PyTree, DeviceBatch], Scores]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule; the defaults are the published run's.

    Attributes:
      learning_rate: the constant, or the peak.
      schedule: "constant", or "warmup_cosine": linear from 0 over `warmup_steps`, then a cosine down to `final_ratio` of the peak at `total_steps`.
      weight_decay: decoupled, times the learning rate; only where the learner's decay mask says so.
      max_grad_norm: gradients of a larger global norm are scaled down to it; math.inf never scales.
    """

    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    final_ratio: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def __post_init__(self):
        if self.schedule not in ("constant", "warmup_cosine"):
            raise InputError(f"optimizer.schedule is {self.schedule!r}: use constant or warmup_cosine")
        if self.schedule == "warmup_cosine" and not 0 <= self.warmup_steps < self.total_steps:
            raise InputError(f"warmup_cosine needs 0 <= warmup_steps < total_steps, got {self.warmup_steps} and {self.total_steps}")
        if not (0 < self.learning_rate < math.inf and self.max_grad_norm > 0):
            raise InputError(
                f"learning_rate must be > 0 and finite and max_grad_norm > 0, got {self.learning_rate} and {self.max_grad_norm} (inf: no clipping)"
            )
        if not 0 <= self.weight_decay < math.inf:  # NaN would reach the parameters past the check of loss and gradient
            raise InputError(f"weight_decay is {self.weight_decay}: it must be >= 0 and finite")

    def rate(self) -> optax.Schedule:
        """Learning rate as a function of the number of updates done."""
        if self.schedule == "constant":
            return optax.constant_schedule(self.learning_rate)
        final = self.learning_rate * self.final_ratio
        schedule = optax.warmup_cosine_decay_schedule(0.0, self.learning_rate, self.warmup_steps, self.total_steps, final)
        return lambda count: schedule(jnp.asarray(count, jnp.float32))


@partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "step"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that an update changes: arrays, or in their place shapes or shardings.

    Attributes:
      params: the model's.
      opt_state: optax's; the moments lie where their parameters lie.
      step: number of updates done, an int32 scalar, replicated.
    """

    params: PyTree
    opt_state: PyTree
    step: Any


class NonFiniteUpdate(RuntimeError):
    """A loss or gradient is NaN or infinite. The state passed to the call is unchanged.

    Attributes:
      step: updates done before this one.
      episodes: indices (`Batch.episode`) of the episodes at fault, or of their microbatch when only the gradient is not finite.
    """

    def __init__(self, what: str, step: int, episodes: Sequence[int]):
        self.what, self.step, self.episodes = what, step, tuple(episodes)
        super().__init__(f"update {step}: {what} is not finite, from episodes {list(self.episodes)} of the batch; no parameter was changed")


class Learner:
    """Compiled update of one model under one objective.

    Example::

        state = learner.init(params)
        batches = [learner.old_log_probs(state, batch) for batch in batches]  # all of a rollout step, before its first update
        for batch in batches:
            state, metrics = learner.update(state, batch)  # the old `state` is consumed
    """

    def __init__(
        self,
        log_probs_fn: LogProbsFn,
        objective: Objective,
        optimizer: OptimizerConfig,
        *,
        mesh: Mesh,
        param_shardings: PyTree[NamedSharding],
        decay_mask: PyTree[bool],
        rows_axes: tuple[str, ...] = (),
    ):
        """Builds the compiled functions; nothing is compiled or allocated yet.

        Args:
          log_probs_fn: the model.
          objective: from `intraskill.grpo.loss`.
          optimizer: AdamW's settings.
          mesh: the devices.
          param_shardings: one per parameter.
          decay_mask: True for the parameters that weight decay applies to, see `decays`.
          rows_axes: the mesh axes that a microbatch's rows are spread over.
        """
        self._log_probs_fn, self._objective, self._optimizer = log_probs_fn, objective, optimizer
        self._rows_axes, self._mesh = rows_axes, mesh
        self._rate = optimizer.rate()
        self._tx = optax.adamw(self._rate, optimizer.beta1, optimizer.beta2, optimizer.eps, weight_decay=optimizer.weight_decay, mask=decay_mask)
        self._param_shardings = param_shardings
        self._replicated = NamedSharding(mesh, P())
        self._rows = NamedSharding(mesh, P(rows_axes or None))
        self._num_row_shards = math.prod(mesh.shape[axis] for axis in rows_axes)
        rows, whole = self._rows, self._replicated
        self._score = jax.jit(log_probs_fn, in_shardings=(param_shardings, rows), out_shardings=whole)
        self._zeros = jax.jit(partial(jax.tree.map, jnp.zeros_like), out_shardings=param_shardings)  # float32: `init` refuses any other dtype
        self._accumulate = jax.jit(
            self._accumulate_impl, in_shardings=(param_shardings, param_shardings, rows), out_shardings=(param_shardings, whole), donate_argnums=1
        )
        # A partial of its own: JAX shares what it compiled between users of one function, and what a learner compiled could not be counted.
        self._norm = jax.jit(partial(optax.tree.norm), in_shardings=(param_shardings,), out_shardings=whole)
        self._apply: Any = None  # see _step
        self._warm: set[tuple[int, ...]] = set()

    # ------------------------------------------------------------------------------------------------------------- state

    def state_shardings(self, params: PyTree) -> TrainState:
        """Where each leaf of the state lies; `params` may be shapes only."""
        opt_state = jax.eval_shape(self._tx.init, params)
        moments = optax.tree_map_params(
            self._tx, lambda _, sharding: sharding, opt_state, self._param_shardings, transform_non_params=lambda _: self._replicated
        )
        return TrainState(self._param_shardings, moments, self._replicated)

    def abstract_state(self, params: PyTree) -> TrainState:
        """Shapes, dtypes and shardings of the state: what a checkpoint is restored into. `params` may be shapes only."""
        shapes = TrainState(params, jax.eval_shape(self._tx.init, params), jax.ShapeDtypeStruct((), jnp.int32))
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.state_shardings(params))

    def init(self, params: PyTree[Array]) -> TrainState:
        """A fresh state on the mesh, with a copy of `params`: an update consumes the state's arrays, never the caller's."""
        other = sorted({str(p.dtype) for p in jax.tree.leaves(params)} - {"float32"})
        if other:
            raise InputError(
                f"parameters to train are {', '.join(other)}: set param_dtype to float32, or small updates round away; activations may be bfloat16"
            )

        def build(p):
            p = jax.tree.map(jnp.copy, p)
            return TrainState(p, self._tx.init(p), jnp.zeros((), jnp.int32))

        return jax.jit(build, out_shardings=self.state_shardings(params))(params)

    # ------------------------------------------------------------------------------------------------------------ update

    def warm_up(self, state: TrainState, microbatches: Sequence[Batch]) -> None:
        """Compiles what an update runs for microbatches of these shapes, and changes nothing: later ones of the same shapes never compile.

        Shapes that it was given before cost nothing. The microbatches may be all padding; each is computed once.
        """
        for batch in microbatches:
            if batch.tokens.shape + batch.index.shape not in self._warm:
                placed = self._place(batch)
                self._score(state.params, placed)
                self._accumulate(state.params, self._zeros(state.params), placed)
                self._warm.add(batch.tokens.shape + batch.index.shape)

    def reference(self, params: PyTree[Array]) -> PyTree[Array]:
        """A frozen copy of `params`, laid out like the policy: what `reference_log_probs` takes."""
        return jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=self._param_shardings)(params)

    def old_log_probs(self, state: TrainState, microbatches: Sequence[Batch]) -> list[Batch]:
        """The microbatches with `old_logprobs` filled from the present parameters; raises `NonFiniteUpdate` if one is not finite."""
        return self._filled("old_logprobs", "an old log-prob", state.params, int(state.step), microbatches)

    def reference_log_probs(self, reference: PyTree[Array], step: int, microbatches: Sequence[Batch]) -> list[Batch]:
        """The microbatches with `reference_logprobs` filled; `step` is what a `NonFiniteUpdate` names."""
        return self._filled("reference_logprobs", "a log-prob of the reference", reference, step, microbatches)

    def _filled(self, field: str, what: str, params: PyTree[Array], step: int, microbatches: Sequence[Batch]) -> list[Batch]:
        scores = [self._score(params, self._place(batch)).logprob for batch in microbatches]  # queued; the host waits below
        filled = []
        for batch, logprob in zip(microbatches, scores, strict=True):
            values = np.where(batch.mask, np.asarray(logprob, np.float32), np.float32(0))
            if not np.isfinite(values).all():
                raise NonFiniteUpdate(what, step, _episodes(batch, ~np.isfinite(values)))
            filled.append(dataclasses.replace(batch, **{field: values}))
        return filled

    def update(self, state: TrainState, microbatches: Sequence[Batch]) -> tuple[TrainState, dict[str, float]]:
        """One optimizer step on the sum of the microbatches' losses.

        Args:
          state: consumed, unless the call raises.
          microbatches: all of the batch. Each shape among them compiles once.

        Returns:
          The new state, and metrics: `loss`, `grad_norm` (before clipping), `learning_rate`, `trained_tokens` and those of `loss`'s table.

        Raises:
          NonFiniteUpdate: the loss or a gradient is not finite.
          ValueError: the objective needs old or reference log-probs and the batch has none yet.
        """
        self._require_filled(microbatches)
        gradient, reports = self._zeros(state.params), []
        for batch in microbatches:
            gradient, report = self._accumulate(state.params, gradient, self._place(batch))
            reports.append(report)
        grad_norm = self._norm(gradient)
        reports, norm, step = jax.device_get((reports, grad_norm, state.step))
        step = int(step)
        for batch, report in zip(microbatches, reports, strict=True):
            if report["bad"].any():
                raise NonFiniteUpdate("the loss", step, _episodes(batch, report["bad"]))
            if not report["finite_gradient"]:
                raise NonFiniteUpdate("the gradient", step, _episodes(batch, batch.mask))
        if not np.isfinite(norm):
            raise NonFiniteUpdate("the gradient's norm", step, sorted({e for batch in microbatches for e in _episodes(batch, batch.mask)}))
        state = self._step(state.params)(state, gradient, grad_norm)
        sums = {name: float(sum(np.float64(r["sums"][name]) for r in reports)) for name in reports[0]["sums"]}
        loss = sums.pop("loss")
        return state, {"loss": loss, "grad_norm": float(norm), "learning_rate": float(np.asarray(self._rate(step)))} | mean_metrics(sums)

    def _require_filled(self, microbatches: Sequence[Batch]) -> None:
        needed = {"old_log_probs": self._objective.needs_old_logprobs, "reference_log_probs": self._objective.needs_reference}
        for name in (name for name, wanted in needed.items() if wanted):
            field = name.replace("log_probs", "logprobs")
            if any(np.isnan(getattr(batch, field)).any() for batch in microbatches):
                raise ValueError(f"{field} are not computed: call {name} on the batches of a rollout step before its first update")

    def programs(self, params: PyTree, batch: DeviceBatch) -> dict[str, jax.stages.Traced]:
        """What an update runs, traced for arguments that may be shapes only: nothing is computed. For plans of memory and work.

        `log_probs` and `gradient` run once a microbatch, `apply` once an update.
        """
        state = self.abstract_state(params)
        norm = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)
        return {
            "log_probs": self._score.trace(params, batch),
            "gradient": self._accumulate.trace(params, params, batch),
            "apply": self._step(state.params).trace(state, state.params, norm),
        }

    def _step(self, params: PyTree) -> Any:
        """The compiled step. The new state lies exactly as `init` laid the first one, or other programs would see arguments of another kind."""
        if self._apply is None:
            self._apply = jax.jit(self._apply_impl, donate_argnums=0, out_shardings=self.state_shardings(params))
        return self._apply

    def _accumulate_impl(self, params: PyTree, gradient: PyTree, batch: DeviceBatch) -> tuple[PyTree, dict[str, Any]]:
        def loss_fn(p):
            scores = self._log_probs_fn(p, batch)
            token_loss, sums = self._objective(scores, batch)
            loss = jnp.sum(token_loss)
            bad = batch.mask & ~(jnp.isfinite(scores.logprob) & jnp.isfinite(token_loss))
            return loss, {"sums": sums | {"loss": loss}, "bad": bad}

        new, report = jax.grad(loss_fn, has_aux=True)(params)
        report["finite_gradient"] = jnp.all(jnp.stack([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(new)]))
        return jax.tree.map(jnp.add, gradient, new), report

    def _apply_impl(self, state: TrainState, gradient: PyTree, norm: Array) -> TrainState:
        scale = jnp.minimum(1.0, self._optimizer.max_grad_norm / jnp.maximum(norm, 1e-30))
        gradient = jax.tree.map(lambda g: g * scale.astype(g.dtype), gradient)
        with jax.numpy_dtype_promotion("standard"):  # optax raises a float to the power of an integer count
            updates, opt_state = self._tx.update(gradient, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state, state.step + 1)

    def _place(self, batch: Batch) -> DeviceBatch:
        """The batch on the mesh. Every process holds the whole batch and gives its devices their rows."""
        num_rows = batch.tokens.shape[0]
        if num_rows % self._num_row_shards:
            raise InputError(
                f"a microbatch of {num_rows} rows cannot be spread over {self._num_row_shards} devices ({'x'.join(self._rows_axes)}): "
                f"make rows_per_microbatch a multiple of {self._num_row_shards}"
            )
        return jax.tree.map(lambda x: jax.make_array_from_callback(x.shape, self._rows, lambda i: x[i]), DeviceBatch.of(batch))


def _episodes(batch: Batch, at: np.ndarray) -> list[int]:
    return sorted({int(e) for e in batch.episode[at & batch.mask]})
