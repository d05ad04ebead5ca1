"""The memory of an optimizer step, computed from the decoder's config: nothing is built, and torch is not imported.

`lm plan` and the error of a run that is out of memory use it; every formula names its source.
"""

import math
from dataclasses import dataclass, replace

from lm.model.config import DecoderConfig
from lm.model.estimates import ADAMW, OptimizerState, parameters, state_values

CHUNK_BYTES = 2**30  # of logits, as in `kernels/cross_entropy`
FLASH_TILE = 128  # rows of a tile in the backward pass of flash attention


@dataclass(frozen=True)
class Step:
    """How a micro-batch is computed."""

    micro_batch_size: int  # sequences
    seq_len: int
    precision: str = "32-true"  # a Trainer's, such as "bf16-mixed"
    kernels: bool = False  # whether the forward pass is `model/fused`, with our kernels
    compile: str = "none"  # as `model.compile`
    accumulate: int = 1  # micro-batches of an optimizer step
    world_size: int = 1  # devices
    sharded: bool = False  # FSDP2: each device holds a part of weights, gradients and optimizer state
    checkpointing: str = "none"  # as `model.activation_checkpointing`
    documents_per_token: float = 0.0  # with a document mask, end-of-text tokens / all tokens

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.seq_len

    @property
    def sequences(self) -> int:
        """Number of sequences of flash attention in a micro-batch: its rows, or with a document mask its documents,
        rounded up to a power of two as in `Batch.max_documents`."""
        documents = self.micro_batch_size + math.ceil(self.tokens * self.documents_per_token)
        return 1 << (documents - 1).bit_length() if self.documents_per_token else self.micro_batch_size

    @property
    def item(self) -> int:
        """Bytes of an activation."""
        return 4 if self.precision.startswith("32") else 2

    @property
    def master_item(self) -> int:
        """Bytes of a stored weight."""
        return 2 if self.precision.endswith("-true") and self.item == 2 else 4


def training_memory(config: DecoderConfig, step: Step, state: OptimizerState = ADAMW) -> dict[str, int]:
    """Peak memory of a step on one device in bytes: by category, and in total as `peak`.

    With one micro-batch per step, the gradients do not exist yet when the activations are largest, so the peak is
    less than the sum; but DDP's buckets, which hold the gradients, always exist. FSDP2 accumulates full gradients until
    the last micro-batch of a step reduces them.
    """
    counts = parameters(config)
    shards = step.world_size if step.sharded else 1
    owners = step.world_size if state.divided and not step.sharded else 1
    memory = {
        "weights": counts["total"] * step.master_item // shards,
        "gradients": counts["total"] * step.master_item // (shards if step.accumulate == 1 else 1),
        "optimizer": state_values(counts, state, owners) * step.master_item // shards,
        "casts": casts(config, step),
        "activations": activations(config, step),
        "working": max(loss_working(config, step), block_working(config, step)),
    }
    memory["peak"] = sum(memory.values())
    if step.accumulate == 1 and (step.world_size == 1 or step.sharded):
        later = memory["gradients"] + max(memory["casts"], memory["working"])
        before = memory["casts"] + memory["activations"] + memory["working"]
        memory["peak"] = memory["weights"] + memory["optimizer"] + max(before, later)
    return memory


def activations(config: DecoderConfig, step: Step) -> int:
    """Bytes that the forward pass saves for the backward pass, without half-precision copies of weights.

    Tensors are counted one by one, as `model/decoder` saves them or, with kernels, `model/fused`; tests compare the
    columns of the table with what a real step saves. For each token a block saves, with C the width, Q and K the widths
    of all query and key heads, I the MLP's and s the bytes of an activation:

    | what                | fused          | plain, compiled   | plain, eager                                 |
    |---------------------|----------------|-------------------|----------------------------------------------|
    | two norms           | 2 s C + 8      | 4 s C + 8         | (16 + 2 s) C + 8: fp32 copies, normed or not |
    | queries, keys       | -, or s (Q+2K) | -, or s (Q+2K)    | -, or 8 (Q+K) in half precision, and in fp32 |
    | (plain, or normed)  |                | + 4 (H+KV)        | s (Q+2K) + 4 (Q+K); + 4 (H+KV) in both       |
    | attention           | s (2Q+2K) + 4H | the same          | the same                                     |
    | MLP                 | 2 s I          | 3 s I             | 4 s I                                        |

    Activation checkpointing saves only the input of a block: the residual stream, and in the fused
    pass the branch. The input of an MLP alone is already saved, or replaces as much.

    Dropout saves a byte per element. Attention is assumed to be a fused kernel that supports grouped heads; not
    counted are dense masks (windows and documents on a CPU), and copies of keys and values for every query head if
    the kernel does not support groups (fp32 on CUDA).
    """
    s, width, layers = step.item, config.hidden_size, config.num_hidden_layers
    attention, mlp = _saved_by_block(config, step)
    saved = {
        "none": layers * (attention + mlp),
        "selective": layers * attention,
        "block": (2 * layers - 1 if step.kernels else layers) * s * width,  # the first block has no stream yet
    }[step.checkpointing]
    ids = 8 + 8
    final = ids + (s * width + 4 if step.kernels else (8 + s) * width + 4)
    logits = (s if step.compile == "inductor" else 4) * config.vocab_size  # the logits, or their log-softmax in fp32
    head = s * width if step.kernels else logits  # kernels save the gradient of the states
    rotary = step.seq_len * config.head_dim * 4
    return step.tokens * (saved + final + head) + rotary


def _saved_by_block(config: DecoderConfig, step: Step) -> tuple[int, int]:
    """Bytes per token that a block saves: norms and attention, and the MLP. See `activations`."""
    s = step.item
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    query_width, key_width = heads * config.head_dim, kv_heads * config.head_dim  # Q, K
    if step.kernels:
        norms, mlp = 2 * s * config.hidden_size, 2 * s * config.intermediate_size
    elif step.compile != "none":
        norms, mlp = 4 * s * config.hidden_size, 3 * s * config.intermediate_size
    else:
        norms, mlp = (16 + 2 * s) * config.hidden_size, 4 * s * config.intermediate_size
    qk = 0
    if config.qk_norm:
        qk = s * (query_width + 2 * key_width)
        if not step.kernels and step.compile == "none":
            qk = 8 * (query_width + key_width) if s == 2 else qk + 4 * (query_width + key_width)
        qk += 0 if step.kernels else 4 * (heads + kv_heads)
    attention = s * (2 * query_width + 2 * key_width) + 4 * heads
    dropout = 2 * config.hidden_size if config.dropout else 0
    return norms + 8 + qk + attention + dropout, mlp


def casts(config: DecoderConfig, step: Step) -> int:
    """Bytes of half-precision copies of fp32 weights, and of the output matrix's gradient if it is kept in fp32.

    With kernels, the copies last a whole optimizer step. Otherwise a forward pass keeps its copies, except of parts
    that are recomputed. With FSDP2 the copies are the gathered weights: embedding and output during a micro-batch, and
    two blocks, as one is gathered ahead.
    """
    counts = parameters(config)
    table = config.vocab_size * config.hidden_size
    if step.sharded:
        layers = config.num_hidden_layers
        blocks = (counts["attention"] + counts["mlp"]) * min(2, layers) // layers
        gathered = counts["embedding"] + counts["lm_head"] + blocks
        return step.item * gathered + (4 * table if step.kernels else 0)
    copied = table + counts["attention"] + counts["mlp"]
    if not step.kernels and step.checkpointing in ("selective", "block"):
        copied -= counts["mlp"] + (counts["attention"] if step.checkpointing == "block" else 0)
    copies = step.item * copied if step.item != step.master_item else 0
    return copies + (4 * table if step.kernels else 0)


def loss_working(config: DecoderConfig, step: Step) -> int:
    """Bytes of temporaries around the output matrix and the loss.

    With kernels: a chunk of logits, or a second copy of the matrix's gradient while it is scaled. Eager: two fp32
    gradients of all logits beside the saved log-softmax. Compiled by inductor: one, in the computation's precision.
    """
    logits = step.tokens * config.vocab_size
    if step.kernels:
        return max(min(CHUNK_BYTES, logits * step.item), 4 * config.vocab_size * config.hidden_size)
    return logits * (step.item if step.compile == "inductor" else 8)


def block_working(config: DecoderConfig, step: Step) -> int:
    """Bytes of temporaries in the backward pass of one block, and of what activation checkpointing recomputes.

    The larger of the two branches counts. The MLP has the gradients of gate and up, the recomputed activation, and the
    gradients of the stream and of the norm's output. Attention has those of the stream and of its output; of queries,
    keys and values, separate and packed; of keys and values for every query head, if heads share them; and flash
    attention's fp32 sum of the queries' gradients, for which each sequence is rounded up to whole tiles.
    """
    item = step.item if step.kernels or step.compile == "inductor" else 4
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    query_width, key_width = heads * config.head_dim, kv_heads * config.head_dim  # Q, K
    mlp = 3 * config.intermediate_size + 3 * config.hidden_size
    attention = (
        2 * config.hidden_size + 2 * (query_width + 2 * key_width) + (2 * query_width if kv_heads < heads else 0)
    )
    tiles = step.tokens + FLASH_TILE * step.sequences if step.item == 2 else 0
    working = max(step.tokens * mlp * item, step.tokens * attention * item + 4 * tiles * (query_width + heads))
    of_attention, of_mlp = _saved_by_block(config, step)
    recomputed = {"selective": of_mlp, "block": of_attention + of_mlp}.get(step.checkpointing, 0)
    return working + step.tokens * recomputed


def largest_micro_batch(
    config: DecoderConfig, step: Step, max_bytes: int, samples: int | None, state: OptimizerState = ADAMW
) -> int | None:
    """The largest micro-batch whose step fits into `most` bytes; None if not even one sequence does.

    It divides `samples`, the sequences per optimizer step on one device; None: each step is one micro-batch, a power
    of two. The micro-batch and accumulation of `step` are replaced.
    """
    if samples is None:
        steps = {2**n: 1 for n in range(32)}  # micro-batch -> micro-batches of a step
    else:
        small = [size for size in range(1, math.isqrt(samples) + 1) if samples % size == 0]
        steps = {size: samples // size for size in (*small, *(samples // size for size in small))}
    for size in sorted(steps, reverse=True):
        candidate = replace(step, micro_batch_size=size, accumulate=steps[size])
        if training_memory(config, candidate, state)["peak"] <= max_bytes:
            return size
    return None
