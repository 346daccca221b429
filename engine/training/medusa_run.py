"""The whole way to Medusa heads: let the target talk, fit heads to what it said, judge and save them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

from config import Settings
from engine.compute.drafters.draft_tree import default_tree
from engine.compute.drafters.medusa_heads import MedusaHeads
from engine.training.fitting import FitOptions, FitResult, frequent_token_ids
from engine.training.medusa_evaluation import SHOWN_TOPS, Evaluation, evaluate_heads
from engine.training.medusa_training import fit_heads
from engine.training.samples import Positions, Sample
from engine.training.training_plan import MedusaPlan, TrainingProgress
from engine.training.training_run import Report, TrainingRun
from engine.training.written import written

_GENERATION_SHARE = 0.6  # of the minutes allowed
_TRAINING_SHARE = 0.93  # of the minutes allowed, generation included


def train_medusa_heads(settings: Settings, plan: MedusaPlan, progress: TrainingProgress) -> Report | None:
    """Do what `plan` says for the model of `settings`; the report, which lies beside the heads as JSON.

    Samples are kept, and the same call goes on from there. None when `progress` ended it before there was
    anything to save; ended later, the heads are saved as far as they were trained. Raises StartRefused.
    """
    run = TrainingRun(settings, plan, progress, keeps_hidden=True)
    samples = run.generate(run.served_target(), _GENERATION_SHARE)
    run.use_all_threads()
    return None if progress.is_stopped() else _train(run, samples, plan, progress)


def _train(
    run: TrainingRun, samples: Sequence[Sample], plan: MedusaPlan, progress: TrainingProgress
) -> Report:
    """Fit, judge and save heads; the report."""
    held_out = [sample for sample in samples if run.is_held_out(sample)]
    kept = [sample for sample in samples if not run.is_held_out(sample)]
    if len(held_out) < 2 or not kept:
        raise run.too_few(len(samples))
    train, judge = Positions(kept), Positions(held_out)
    vocab_size = run.target.vocab_size
    token_ids = frequent_token_ids(train.token_ids, vocab_size, min(plan.num_token_ids, vocab_size))
    heads = MedusaHeads(run.target, plan.num_heads, token_ids, default_tree(plan.num_heads))
    untrained = evaluate_heads(heads, judge, progress)
    options = FitOptions(plan.num_epochs, plan.seed, run.deadline(_TRAINING_SHARE))
    fitted = fit_heads(heads, train, options, progress)
    began = time.monotonic()
    found = evaluate_heads(heads, judge, progress)
    run.seconds |= {"train": fitted.seconds, "evaluate": time.monotonic() - began}
    heads.tree = found.tree
    with written(plan.output):
        heads.save(plan.output)
    return run.write_report(_results(len(train), fitted, found, untrained))


def _results(num_train_tokens: int, fitted: FitResult, found: Evaluation, untrained: Evaluation) -> Report:
    return {
        "num_train_tokens": num_train_tokens,
        "num_judged_tokens": found.num_tokens,
        "coverage": found.coverage,
        "shown_tops": list(SHOWN_TOPS),
        "accuracy": found.accuracy,
        "tokens_per_step": found.tokens_per_step,
        "untrained_tokens_per_step": untrained.tokens_per_step,
        "tree_paths": [list(path) for path in found.tree.paths],
        "training": asdict(fitted),
    }
