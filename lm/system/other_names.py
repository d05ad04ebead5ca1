"""Names used by Lightning, Hugging Face, nanoGPT and others -> our options, for messages about wrong ones."""

from difflib import get_close_matches

from lm.system.removed_options import REMOVED
from lm.system.units import MAX_SHOWN, listed

MAX_OPTIONS, MAX_UNKNOWN = 10, 6  # options listed in a message

# Our option -> the last part of other names for it. Only options that the command has are suggested.
OPTIONS = {
    "trainer.max_steps": "max_iters num_steps train_steps total_steps limit_train_batches iterations",
    "trainer.val_interval": "val_check_interval eval_interval eval_every eval_steps val_every",
    "trainer.checkpoint_interval": "save_every save_interval save_steps save_every_n_steps ckpt_interval "
                                   "checkpoint_every",
    "trainer.keep_checkpoints": "save_total_limit save_top_k",
    "trainer.keep_every": "every_n_train_steps keep_period",
    "trainer.log_interval": "log_every_n_steps log_every logging_steps",
    "trainer.gradient_clip_val": "grad_clip gradient_clip max_grad_norm clip",
    "trainer.precision": "dtype mixed_precision amp bf16 fp16",
    "trainer.devices": "gpus num_gpus n_gpus num_devices",
    "trainer.default_root_dir": "out_dir output_dir root",
    "trainer.early_stopping.patience": "patience early_stopping_patience",
    "model.optimizer.name": "optimizer optim",
    "model.optimizer.lr": "learning_rate max_lr peak_lr",
    "model.optimizer.weight_decay": "wd decay",
    "model.optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "model.schedule.name": "lr_scheduler lr_scheduler_type scheduler",
    "model.attention": "attn_implementation",
    "model.schedule.decay_steps": "lr_decay_iters",
    "model.schedule.warmup_steps": "warmup warmup_iters num_warmup_steps lr_warmup_steps",
    "model.schedule.final_fraction": "min_lr_ratio",
    "model.optimizer.eps": "adam_epsilon epsilon",
    "model.decoder.hidden_size": "n_embd n_embed d_model dim embed_dim width",
    "model.decoder.num_hidden_layers": "n_layer n_layers num_layers depth",
    "model.decoder.num_attention_heads": "n_head n_heads num_heads heads",
    "model.decoder.num_key_value_heads": "n_kv_head n_kv_heads num_kv_heads",
    "model.decoder.intermediate_size": "ffn_dim d_ff mlp_dim n_inner",
    "model.decoder.max_position_embeddings": "context_length block_size max_seq_len sequence_len n_ctx context "
                                             "max_length",
    "data.path": "dataset data_path data_dir",
    "seed_everything": "seed",
    "max_new_tokens": "max_tokens max_length",
    "temperature": "temp",
    "ckpt_path": "model checkpoint resume_from_checkpoint checkpoint_dir checkpoint_path "
                 "model_path model_name model_name_or_path",
    "input": "dataset data_dir data_path files",
    "output": "out out_dir output_dir save_dir",
    "max_items": "limit",
    "depth": "size params num_params n_layer num_layers",
    "depths": "sizes",
    "ratio": "target_param_data_ratio tokens_per_param",
    "run": "config",
}  # fmt: skip
GROUPS = {  # of rates in model.optimizer.groups
    "lm_head": "output", "unembedding": "output", "embed_tokens": "embedding", "wte": "embedding", "norm": "norms",
    "hidden": "matrices", "muon": "matrices",
}  # fmt: skip
OTHER_PRECISIONS = {
    "bf16": "bf16-mixed", "bfloat16": "bf16-mixed", "fp16": "16-mixed", "float16": "16-mixed", "16": "16-mixed",
    "fp32": "32-true", "float32": "32-true", "32": "32-true", "fp8": "fp8-rowwise",
}  # fmt: skip
# What to do instead of an option that others have for training -> the last part of its name.
FIXES = {
    "it follows from data.global_batch_tokens and data.micro_batch_size":
        "accumulate_grad_batches gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps",
    "give data.micro_batch_size, and data.global_batch_tokens for the optimizer step":
        "batch_size per_device_train_batch_size",
    "give trainer.max_steps or trainer.max_tokens; trainer.max_epochs limits them": "num_train_epochs epochs",
    "TensorBoard and metrics.jsonl are always written to the run folder; --trainer.logger "
    "lightning.pytorch.loggers.WandbLogger adds W&B, after `pip install wandb`":
        "logger report_to wandb_log wandb_project wandb",
    "`lm validate` measures a checkpoint": "eval_only do_eval",
    "`lm import --input FOLDER --output models/x` makes a checkpoint of a model, for --ckpt_path models/x":
        "model_name_or_path init_from model_name",
    "give --trainer.strategy fsdp2, which shards the model over the devices": "tensor_parallel_degree fsdp deepspeed",
    "give --trainer.strategy ddp": "ddp",
    "give --trainer.accelerator cpu, or gpu, or leave it out: a GPU that is there is used": "device",
    "`lm plan` with the same options trains nothing, and says what the run would be": "dry_run",
    "give --run NAME": "name run_name",
    "give model.schedule.final_fraction, a fraction of lr: 0.1 ends at a tenth of it": "min_lr",
    "give data.val_tokens, which counts tokens and not batches: 64K": "limit_val_batches eval_iters",
    "give --ckpt_path auto, which resumes the newest run of this config; `last` or a folder chooses":
        "resume resume_from resume_from_checkpoint",
    "give --model.schedule.warmup_ratio, and --model.schedule.warmup_steps 0 if the config has some": "warmup_ratio",
    "leave it out; threads of the training process read the data, which is faster": "num_workers",
    "leave it out: attention weights have no dropout; model.decoder.dropout is that of embeddings and blocks":
        "attention_dropout attn_dropout attn_pdrop",
}  # fmt: skip


def nearest_option(name: str, known: list[str], section: str = "") -> str:
    """A hint for an option that does not exist: what to do instead, or the nearest name, or the options if few.

    `section` is that of a name without it, such as `model` of an argument of `LanguageModule`.
    """
    name = name.replace("-", "_")
    last = name.rpartition(".")[2]
    if (full := f"{section}.{name}" if section else name) in REMOVED:
        return REMOVED[full][1]
    if "trainer.max_steps" in known and (fixes := [fix for fix, others in FIXES.items() if last in others.split()]):
        return fixes[0]
    if (plain := name.removeprefix("no_")) in known and plain != name:
        return f"give --{plain} {'null' if any(one.startswith(f'{plain}.') for one in known) else 'false'}"
    renamed = ".".join(GROUPS.get(part, part) for part in name.split("."))
    if renamed != name and renamed in known:
        return f"did you mean {renamed!r}?"
    ours = [option for option, others in OPTIONS.items() if last in others.split()]
    ours += OPTIONS.get(name, "").split() if "." in name else []  # as for `generate --trainer.precision`
    close = [option for option in known if any(name == option or name.endswith(f".{option}") for name in ours)]
    whole = [option for option in known if min(len(option), len(name)) > 3 and "." not in option + name]
    alike = [option for option in whole if option.startswith(name) or name.startswith(option)]  # `text`, `train`
    close = close or sorted(alike, key=lambda option: abs(len(option) - len(name)))
    close = close or sorted((option for option in known if option.endswith(f".{name}")), key=len)  # `lr`
    close = close or [option for option in known if option.rpartition(".")[2].startswith(name)]  # `temp`
    if close := close or get_close_matches(name, known, 1, cutoff=0.6):
        return f"did you mean {close[0]!r}?"
    options = [option for option in known if option not in ("h", "help", "print_shtab") and option[-1] != "+"]
    names = ", ".join(f"--{option}" for option in options)
    return f"there are {names}" if len(options) <= MAX_OPTIONS else ""


def unknown_options(hints: dict[str, str]) -> str:
    """A message for options that do not exist, as typed, each with the option to use instead."""
    cut = {name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}...": hint for name, hint in hints.items()}
    if len(cut) == 1:
        [(name, hint)] = cut.items()
        return f"there is no option {name!r}" + (f"; {hint}" if hint else "")
    described = [f"{name!r}{f' ({hint})' if hint else ''}" for name, hint in cut.items()]
    return f"there are no options {listed(described, MAX_UNKNOWN)}"
