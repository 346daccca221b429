"""`python -m tests.bench.draft_pair`: make a small draft model for the served model, on this machine.

The draft model is the target with most of its layers left out, then distilled on what the target itself
says: prompts from templates, answers drawn from the target, the Kullback-Leibler divergence from its
distribution as the loss. Embeddings stay the target's and are not trained, so the vocabulary is the same by
construction. `--resume` trains an earlier result further; texts are kept beside the result and drawn once.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from config import load_settings
from engine.compute.loading.loader import LoadedModel, load_model
from engine.compute.loading.model_source import resolve_model
from engine.compute.runner.dummy_steps import Part, pack_step
from engine.compute.runner.packed_forward import PackedForward
from engine.compute.sampling.sampler import Sampler
from engine.plan.step_records import SamplingInputs
from engine.text.tokenizer import Tokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
BLOCK_SIZE = 16
HELD_OUT_SEED, TRAINING_SEED = 1, 2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")

TEMPLATES = (
    "What is {topic}?",
    "Explain {topic} to a child of ten.",
    "Explain {topic} step by step.",
    "Write a short paragraph about {topic}.",
    "Write a short story about {topic}.",
    "Write a poem about {topic}.",
    "Write an email to a colleague about {topic}.",
    "Write a product description that mentions {topic}.",
    "List five facts about {topic}.",
    "List the advantages and disadvantages of {topic}.",
    "Give me three ideas for a project about {topic}.",
    "Give me a plan for learning about {topic} in a week.",
    "Summarise the history of {topic} in a few sentences.",
    "Compare {topic} and {other}.",
    "How are {topic} and {other} related?",
    "Who should care about {topic}, and why?",
    "What are common mistakes people make with {topic}?",
    "Write a dialogue between a teacher and a student about {topic}.",
    "Answer as JSON with the keys title, summary and tags: {topic}.",
    "Make a markdown table with three rows about {topic}.",
    "Rewrite this in a formal tone: I really like {topic}, it is way better than {other}!",
    "Translate to French: I am reading a book about {topic}.",
    "Correct the grammar: She dont knows nothing about {topic} and {other}.",
    "Write a Python function that prints facts about {topic} one after another.",
    "Write a Python class that represents {topic}, with two methods.",
    "Write an SQL query for a table about {topic}.",
    "Write a bash script that searches text files for {topic}.",
    "Continue: Once upon a time there was somebody who knew all about {topic},",
    "Write three multiple-choice questions about {topic} with their answers.",
    "I have {number} books about {topic} and give away {small}. How many are left? Explain.",
    "What is {number} times {small}, and what has it to do with {topic}?",
    "Be brief: why does {topic} matter?",
)
TOPICS = (
    *("the water cycle", "gravity", "bread baking", "the French Revolution", "photosynthesis", "chess"),
    *("machine learning", "the stock market", "volcanoes", "jazz music", "the Roman Empire", "bicycles"),
    *("honey bees", "the human heart", "climate change", "coffee", "black holes", "public speaking"),
    *("the internet", "gardening", "the Olympic Games", "vaccines", "the Great Wall of China", "sleep"),
    *("sorting algorithms", "dogs", "the moon", "democracy", "electric cars", "Shakespeare", "yoga"),
    *("dinosaurs", "the periodic table", "trains", "recursion", "the Amazon rainforest", "football"),
    *("time management", "the Second World War", "whales", "solar energy", "chocolate", "robots"),
    *("databases", "friendship", "the Renaissance", "earthquakes", "cooking pasta", "photography"),
    *("linear equations", "the ocean", "job interviews", "ancient Egypt", "birds", "antibiotics"),
    *("city planning", "probability", "mountain climbing", "glass", "language learning", "wine", "paper"),
)
HELD_OUT_TOPICS = (
    *("the speed of light", "penguins", "the printing press", "hash tables", "tea", "the violin"),
    *("inflation", "rainbows", "the Silk Road", "swimming", "encryption", "hospitals"),
)


class Sample(NamedTuple):
    """One text: a rendered prompt and what the target answered at `temperature` under `seed`."""

    token_ids: list[int]
    num_prompt_tokens: int
    temperature: float
    seed: int


@dataclass(slots=True)
class Text:
    """A text with what the target thought of it: its last hidden states, one a token but the last."""

    sample: Sample
    hidden: torch.Tensor  # [tokens - 1, hidden size], after the final norm


def make_prompts(tokenizer: Tokenizer, topics: Sequence[str], count: int, seed: int) -> list[list[int]]:
    """`count` chat prompts, no two equal as long as there are enough of them."""
    rng = random.Random(seed)
    texts: dict[str, None] = {}
    for _ in range(20 * count):
        topic, other = rng.sample(topics, 2)
        number, small = rng.randrange(12, 99), rng.randrange(2, 12)
        text = rng.choice(TEMPLATES).format(topic=topic, other=other, number=number, small=small)
        texts[text] = None
        if len(texts) == count:
            break
    return [tokenizer.render_chat([{"role": "user", "content": text}]) for text in texts]


# What the target says.


class TextGenerator:
    """Draws texts from the target, many at a time, and keeps its hidden states on the way."""

    def __init__(self, loaded: LoadedModel, batch_size: int, max_tokens: int) -> None:
        self._loaded = loaded
        self._forward = PackedForward(loaded)
        self._sampler = Sampler(loaded.vocab_size, loaded.device)
        self._batch_size = batch_size
        self._max_tokens = max_tokens
        self._hidden = torch.empty(0)  # [tokens of the step, hidden size]
        decoder: Any = loaded.model.get_decoder()
        decoder.norm.register_forward_hook(self._keep)

    def _keep(self, _module: object, _inputs: object, output: torch.Tensor) -> None:
        self._hidden = output[0]

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[list[int]], temperatures: Sequence[float], say: Callable[[str], None]
    ) -> list[Text]:
        """A text for each prompt, in order; prompt i is answered at the i-th of `temperatures`, in turns."""
        longest = max(map(len, prompts)) + self._max_tokens
        width = -(-longest // BLOCK_SIZE)
        kv = self._forward.make_kv(width * self._batch_size, BLOCK_SIZE)
        waiting = list(reversed(range(len(prompts))))
        slots: dict[int, int] = {}  # of the running texts, longest running first
        samples = [
            Sample(list(prompt), len(prompt), temperatures[i % len(temperatures)], i)
            for i, prompt in enumerate(prompts)
        ]
        hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
        free = list(range(self._batch_size))
        while waiting or slots:
            new = [waiting.pop() for _ in range(min(len(waiting), len(free), 8))]
            running = [*slots, *new]
            slots |= {index: free.pop() for index in new}
            parts = []
            for index in running:
                tokens, slot = samples[index].token_ids, slots[index]
                first = 0 if index in new else len(tokens) - 1
                parts.append(Part(tokens, first, len(tokens), range(slot * width, (slot + 1) * width)))
            drawn = self._step(parts, [samples[index] for index in running], kv)
            chunks = torch.split(self._hidden, [part.stop - part.first for part in parts])
            for index, token, chunk in zip(running, drawn, chunks, strict=True):
                hidden[index].append(chunk.clone())
                tokens = samples[index].token_ids
                tokens.append(token)
                count = len(tokens) - samples[index].num_prompt_tokens
                if token in self._loaded.eos_token_ids or count == self._max_tokens:
                    free.append(slots.pop(index))
                    if (len(prompts) - len(waiting) - len(slots)) % 100 == 0:
                        say(f"{len(prompts) - len(waiting) - len(slots)} of {len(prompts)} texts drawn")
        return [Text(sample, torch.cat(rows)) for sample, rows in zip(samples, hidden, strict=True)]

    def _step(self, parts: Sequence[Part], samples: Sequence[Sample], kv: Any) -> list[int]:
        inputs = pack_step(parts, BLOCK_SIZE)
        logits = self._forward(inputs, kv)
        positions = np.array([part.stop for part in parts], np.int64)
        return self._sampler.sample(logits, sampling_of(samples, positions)).token_ids


def sampling_of(samples: Sequence[Sample], positions: np.ndarray) -> SamplingInputs:
    """The rows that draw position i of sample i."""
    num_rows = len(positions)
    return SamplingInputs(
        temperature=np.array([sample.temperature for sample in samples], np.float32),
        top_k=np.zeros(num_rows, np.int32),
        top_p=np.ones(num_rows, np.float32),
        min_p=np.zeros(num_rows, np.float32),
        seed=np.array([sample.seed for sample in samples], np.int64),
        position=positions,
        num_logprobs=np.full(num_rows, -1, np.int32),
    )


def cached_texts(path: Path, make: Callable[[], list[Text]]) -> list[Text]:
    """The texts in `path`, made and written there first if there is no such file."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [(tuple(text.sample), text.hidden) for text in make()]
        torch.save(rows, path)
    return [Text(Sample(*sample), hidden) for sample, hidden in torch.load(path, weights_only=True)]


# The draft model.


def keep_layers(target: Any, kept: Sequence[int]) -> Any:
    """A model of the target's class with these of its layers and all that is not a layer, in float32."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    config._attn_implementation = "sdpa"
    draft = type(target)(config).float()
    new_index = {old: new for new, old in enumerate(kept)}
    weights = {}
    for name, value in target.state_dict().items():
        before, found, after = name.partition(".layers.")
        index, _, rest = after.partition(".")
        if not found:
            weights[name] = value
        elif int(index) in new_index:
            weights[f"{before}.layers.{new_index[int(index)]}.{rest}"] = value
    draft.load_state_dict(weights)
    return draft


def choose_layers(asked: str, num_layers: int) -> list[int]:
    """`0,1,28,29` as it is; a count: the first half of them from the front, the others from the end."""
    if "," in asked:
        return [int(part) for part in asked.split(",")]
    count = int(asked)
    front = count - count // 2
    return [*range(front), *range(num_layers - count + front, num_layers)]


class Distillation:
    """Fits a draft model to the target's texts; embeddings and output projection stay as they are."""

    def __init__(self, draft: Any, texts: Sequence[Text], arguments: argparse.Namespace) -> None:
        self._draft = draft
        self._texts = texts
        self._arguments = arguments
        self._head = draft.get_output_embeddings().weight.detach().bfloat16()  # [vocab, hidden size]
        draft.get_input_embeddings().weight.requires_grad_(False)
        draft.get_output_embeddings().weight.requires_grad_(False)
        self._parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(
            self._parameters, lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self._rng = random.Random(TRAINING_SEED)
        self._generator = torch.Generator().manual_seed(TRAINING_SEED)
        self.num_tokens = 0

    def run(self, say: Callable[[str], None]) -> None:
        """Train for the minutes asked for; the learning rate warms up and falls with time."""
        seconds, begin, losses = self._arguments.minutes * 60, time.perf_counter(), []
        self._draft.train()
        for step, batch in enumerate(self._batches()):
            passed = (time.perf_counter() - begin) / seconds
            if passed >= 1:
                break
            rate = min(1.0, (step + 1) / 30) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * passed)))
            for group in self._optimizer.param_groups:
                group["lr"] = self._arguments.learning_rate * rate
            losses.append(self._step(batch))
            if step % 50 == 49:
                say(f"{passed:4.0%} step {step + 1}, {self.num_tokens} tokens, loss {np.mean(losses):.3f}")
                losses.clear()
        self._draft.eval()

    def _batches(self) -> Iterator[list[Text]]:
        while True:
            order = sorted(self._texts, key=lambda text: len(text.hidden) + self._rng.random() * 40)
            size = self._arguments.train_batch
            batches = [order[first : first + size] for first in range(0, len(order), size)]
            self._rng.shuffle(batches)
            yield from batches

    def _step(self, batch: Sequence[Text]) -> float:
        """One update: hidden states at all positions, divergence, which costs most, at a random part."""
        token_ids = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(text.sample.token_ids[:-1]) for text in batch], batch_first=True
        )
        lengths = torch.tensor([len(text.hidden) for text in batch])
        starts = torch.tensor([text.sample.num_prompt_tokens - 1 for text in batch])
        column = torch.arange(token_ids.shape[1])
        real = column < lengths[:, None]
        drawn = real & (column >= starts[:, None])
        drawn &= torch.rand(drawn.shape, generator=self._generator) < self._arguments.share
        self.num_tokens += int(lengths.sum())
        target = torch.nn.utils.rnn.pad_sequence([text.hidden for text in batch], batch_first=True)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self._draft.get_decoder()(input_ids=token_ids, use_cache=False).last_hidden_state
            target_log = (target[drawn].bfloat16() @ self._head.T).float().log_softmax(-1)
            log_probs = F.linear(hidden[drawn], self._head).float().log_softmax(-1)  # [positions, vocab]
        loss = F.kl_div(log_probs, target_log, reduction="batchmean", log_target=True)
        wanted = target[real].float()
        loss = loss + self._arguments.hidden_weight * F.mse_loss(hidden[real].float(), wanted) / wanted.var()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._optimizer.step()
        return float(loss.detach())


# What came of it.


@torch.inference_mode()
def acceptance(draft: Any, texts: Sequence[Text], vocab_size: int, gamma: int) -> dict[str, float]:
    """How often the draft model, given the text so far, draws the token that the target drew.

    Both under the same noise, as verification by match does. `tokens_per_step` counts what chains of `gamma`
    drafts would have brought, the recovered or bonus token included.
    """
    sampler = Sampler(vocab_size, torch.device("cpu"))
    hits, steps, committed = [], 0, 0
    for text in texts:
        sample = text.sample
        start, tokens = sample.num_prompt_tokens, sample.token_ids
        logits = draft(torch.tensor([tokens[:-1]]), use_cache=False).logits[0, start - 1 :]
        positions = np.arange(start, len(tokens))
        drawn = sampler.sample(logits.float(), sampling_of([sample] * len(positions), positions)).token_ids
        right = [a == b for a, b in zip(drawn, tokens[start:], strict=True)]
        hits += right
        at = 0
        while at < len(right):
            run = 0
            while run < gamma and at + run < len(right) and right[at + run]:
                run += 1
            at += run + 1
            steps += 1
        committed += len(right)
    return {"acceptance": float(np.mean(hits)), "tokens_per_step": committed / steps}


@torch.inference_mode()
def step_ms(forwards: Sequence[PackedForward], rounds: int, context: int = 192) -> list[float]:
    """The median time of one decode of one sequence, draft and target in turns."""
    blocks = range(-(-context // BLOCK_SIZE))
    part = Part([7] * context, context - 1, context, blocks)
    inputs = pack_step([part], BLOCK_SIZE)
    kvs = [forward.make_kv(len(blocks), BLOCK_SIZE) for forward in forwards]
    times: list[list[float]] = [[] for _ in forwards]
    for _ in range(rounds):
        for index, forward in enumerate(forwards):
            begin = time.perf_counter()
            forward(inputs, kvs[index])
            times[index].append((time.perf_counter() - begin) * 1000)
    return [float(np.median(column)) for column in times]


def evaluate(draft: Any, texts: Sequence[Text], vocab_size: int, gamma: int) -> dict[str, Any]:
    """Acceptance by temperature, in the precision that is served."""
    served = copy.deepcopy(draft).bfloat16().eval()
    by_temperature: dict[str, Any] = {}
    for temperature in sorted({text.sample.temperature for text in texts}):
        chosen = [text for text in texts if text.sample.temperature == temperature]
        by_temperature[f"T={temperature:g}"] = acceptance(served, chosen, vocab_size, gamma)
    return by_temperature


def save(draft: Any, source: Path, out: Path) -> None:
    """Write a directory that the server loads: bfloat16 weights and the target's own tokenizer."""
    copy.deepcopy(draft).bfloat16().save_pretrained(out)
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, out / name)


def read_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.draft_pair", description=__doc__)
    parser.add_argument("--model", default="", help="the target (default: the served default)")
    parser.add_argument("--out", type=Path, default=REPOSITORY / ".bench" / "draft-smollm2")
    parser.add_argument("--layers", default="4", help="how many layers, or their numbers (default 4)")
    parser.add_argument("--prompts", type=int, default=1000, help="training texts (default 1000)")
    parser.add_argument("--held-out", type=int, default=64, help="texts to judge by (default 64)")
    parser.add_argument("--tokens", type=int, default=160, help="longest answer (default 160)")
    parser.add_argument("--minutes", type=float, default=12.0, help="training time (default 12)")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--train-batch", type=int, default=6, help="texts in an update (default 6)")
    parser.add_argument("--hidden-weight", type=float, default=1.0, help="of hidden states in the loss")
    parser.add_argument("--share", type=float, default=0.35, help="part of the positions in an update's loss")
    parser.add_argument("--gamma", type=int, default=4, help="chain length of tokens_per_step (default 4)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--resume", action="store_true", help="go on with what --out holds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw texts, cut, judge, distil, judge, save; the report is printed and written beside the weights."""
    arguments = read_arguments(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(TRAINING_SEED)

    def say(line: str) -> None:
        print(f"… {line}", file=sys.stderr, flush=True)

    settings = load_settings(["--model", arguments.model] if arguments.model else [])
    directory = resolve_model(settings.model, settings.home)
    tokenizer, target = Tokenizer(directory), load_model(directory, settings.model)
    generator = TextGenerator(target, 64, arguments.tokens)

    def texts(kind: str, count: int, topics: Sequence[str], seed: int, mix: Sequence[float]) -> list[Text]:
        path = arguments.out.parent / f"{arguments.out.name}-texts" / f"{kind}-{count}x{arguments.tokens}.pt"
        prompts = make_prompts(tokenizer, topics, count, seed)
        return cached_texts(path, lambda: generator.generate(prompts, mix, say))

    held_out = texts("held-out", arguments.held_out, HELD_OUT_TOPICS, HELD_OUT_SEED, (0.0, 0.7))
    training = texts("training", arguments.prompts, TOPICS, TRAINING_SEED, (0.0, 1.0, 0.7, 1.0))
    say(f"{sum(len(text.hidden) for text in training)} tokens to train on")
    kept = choose_layers(arguments.layers, target.config.num_hidden_layers)
    source = target.model
    if arguments.resume:
        source = load_model(arguments.out, settings.model).model
        kept = list(range(source.config.num_hidden_layers))
    draft = keep_layers(source, kept)
    report: dict[str, Any] = {"layers": kept, "resumed": arguments.resume}
    report["before"] = evaluate(draft, held_out, target.vocab_size, arguments.gamma)
    say(f"before: {report['before']}")
    distillation = Distillation(draft, training, arguments)
    distillation.run(say)
    report["trained_tokens"] = distillation.num_tokens
    report["after"] = evaluate(draft, held_out, target.vocab_size, arguments.gamma)
    save(draft, directory, arguments.out)
    loaded = load_model(arguments.out, settings.model)
    report |= sizes_and_times(target, loaded)
    (arguments.out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=1))
    return 0


def sizes_and_times(target: LoadedModel, draft: LoadedModel) -> dict[str, Any]:
    """Parameters of both, and what a decode step of each takes here."""
    target_ms, draft_ms = step_ms([PackedForward(target), PackedForward(draft)], rounds=40)
    return {
        "target_parameters": target.model.num_parameters(),
        "draft_parameters": draft.model.num_parameters(),
        "target_step_ms": target_ms,
        "draft_step_ms": draft_ms,
        "cost_ratio": draft_ms / target_ms,
    }


if __name__ == "__main__":
    sys.exit(main())
