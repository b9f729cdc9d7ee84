"""A GRPO update as one writes it with Hugging Face and torch: old log-probs, clipped loss, backward, AdamW, microbatch by microbatch.

It is given what ours is given, and saved what ours is saved: only hidden states that predict a trained token meet the vocabulary.
"""

import dataclasses

import numpy as np
import torch

from intraskill.grpo.learner import OptimizerConfig
from intraskill.grpo.loss import ClippedPolicyGradient


@dataclasses.dataclass(frozen=True)
class Rows:
    """One episode a row: tokens [R, T], which of them are trained [R, T], each episode's advantage [R]."""

    tokens: np.ndarray
    trained: np.ndarray
    advantage: np.ndarray

    def split(self, count: int) -> list["Rows"]:
        columns = (self.tokens, self.trained, self.advantage)
        return [Rows(*(c[start : start + count] for c in columns)) for start in range(0, len(self.tokens), count)]


class Loop:
    """The model with its optimizer; `update` trains it in place."""

    def __init__(self, model, optimizer: OptimizerConfig, objective: ClippedPolicyGradient):
        self._model, self._objective, self._max_norm = model.train(), objective, optimizer.max_grad_norm
        groups: dict[bool, list] = {True: [], False: []}
        for parameter in model.parameters():
            groups[parameter.ndim > 1].append(parameter)  # weight decay leaves vectors alone, as the learner does
        decays = {True: optimizer.weight_decay, False: 0.0}
        self._adamw = torch.optim.AdamW(
            [{"params": parameters, "weight_decay": decays[matrix]} for matrix, parameters in groups.items()],
            lr=optimizer.learning_rate,
            betas=(optimizer.beta1, optimizer.beta2),
            eps=optimizer.eps,
        )

    def log_probs(self, rows: Rows) -> torch.Tensor:
        """Of the trained tokens of all rows, one after the other."""
        ids, trained = torch.tensor(rows.tokens, dtype=torch.long), torch.tensor(rows.trained)
        hidden = self._model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][trained[:, 1:]]
        scores = torch.log_softmax(self._model.lm_head(hidden).float(), dim=-1)
        return scores.gather(-1, ids[:, 1:][trained[:, 1:]][:, None])[:, 0]

    def old_log_probs(self, parts: list[Rows]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.log_probs(rows) for rows in parts]

    def update(self, parts: list[Rows], old: list[torch.Tensor]) -> tuple[float, float]:
        """One optimizer step; returns the loss and the gradient's norm before clipping."""
        self._adamw.zero_grad(set_to_none=True)
        num_episodes, total = sum(len(rows.tokens) for rows in parts), 0.0
        for rows, before in zip(parts, old, strict=True):
            counts = rows.trained.sum(axis=1)
            advantage = torch.tensor(np.repeat(rows.advantage, counts), dtype=torch.float32)
            weight = torch.tensor(np.repeat(1 / (counts * num_episodes), counts), dtype=torch.float32)
            ratio = torch.exp(self.log_probs(rows) - before)
            clipped = torch.clamp(ratio, 1 - self._objective.clip_low, 1 + self._objective.clip_high)
            loss = -(weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_norm)
        self._adamw.step()
        return total, norm.item()
