"""Names that `Run` does not have: those of other libraries and of other objects. The error says what to type."""

from __future__ import annotations

from phalanx.train.model.wrapped import Wrapped
from phalanx.worker.process_group.group import WorkerProcessGroup

# Names of Accelerate, Fabric, Lightning, DeepSpeed, Ray Train, Horovod and torch.distributed -> what to type.
_TYPED: dict[str, tuple[str, ...]] = {
    "run.wrap(model), and run.loader(dataset) for the data; the optimizer stays as it is": ("initialize", "prepare"),
    "run.wrap(model)": ("prepare_model", "setup", "setup_module", "broadcast_parameters", "ddp"),
    "run.wrap(model); the optimizer stays as it is": ("prepare_optimizer", "prepare_scheduler", "setup_optimizers"),
    'run.wrap(model, "fsdp")': ("fsdp",),
    'run.wrap(model, precision="bf16")': ("amp", "autocast", "precision"),
    "run.wrap(model, accumulate=4)": ("accumulate", "no_backward_sync", "no_sync"),
    "ddp.export(path), of ddp = run.wrap(model)": ("save_model", "unwrap", "unwrap_model"),
    "run.loader(dataset, batch_size=64)": (
        *("data_loader", "dataloader", "get_dataset_shard", "prepare_data_loader", "sampler"),
        *("setup_dataloaders", "split_between_processes", "train_dataloader"),
    ),
    "for epoch in run.epochs(10)": ("current_epoch", "epoch"),
    "run.steps": ("global_step", "step_count"),
    "run.backward(loss)": ("manual_backward",),
    "run.step(opt, clip=1.0)": ("clip", "clip_grad_norm", "clip_grad_norm_", "clip_gradients"),
    "run.step(opt, loss=loss), which also clears the gradients": ("optimizer_step", "zero_grad"),
    "run.step(opt, scheduler=scheduler, loss=loss)": ("lr_scheduler_step", "scheduler_step"),
    "run.step(opt).done: whether it was an update": ("sync_gradients",),
    "run.evaluate(test, measure)": ("gather_for_metrics", "test", "validate"),
    "run.log(accuracy=accuracy)": ("log_dict", "log_metrics", "logger", "metric", "metrics", "report"),
    'phalanx.main(train, log_to="wandb")': ("get_tracker", "init_trackers", "trackers"),
    "phalanx.main(train, hyperparameters=vars(args))": ("config", "hparams", "hyperparameters", "save_hyperparameters"),
    "phalanx.main(train, seed=1)": ("set_seed",),
    "run.save(), or phalanx run --checkpoints DIR": ("save_checkpoint", "save_state"),
    "run.keep(model, opt, data), which restores them": (
        *("get_checkpoint", "load", "load_checkpoint", "load_state", "register_for_checkpointing", "restore"),
        *("resume", "skip_first_batches"),
    ),
    'run.state["best"]': ("best",),
    "run.rank": ("get_rank", "global_rank", "process_index"),
    "run.world_size": ("get_world_size", "num_processes", "size", "world"),
    "run.group.local_rank": ("get_local_rank", "local_process_index"),
    "run.group.local_rank == 0": ("is_local_main_process", "is_local_zero"),
    "run.group.local_world_size": ("local_size",),
    "run.group.is_main": ("is_global_zero", "is_main_process", "is_master", "on_main_process"),
    "with run.group.first():": ("local_main_process_first",),
    'with run.group.first("world"):': ("main_process_first", "rank_zero_first"),
    "run.group.barrier()": ("synchronize", "wait", "wait_for_everyone"),
    "run.group.gather(x, all=True)": ("all_gather", "all_gather_object", "allgather"),
    "run.group.sum(x), or run.group.mean(x)": ("all_reduce", "allreduce", "reduce"),
    "x.to(run.device); run.batches moves each batch": ("cuda", "to", "to_device"),
    "phalanx.main(train), and in the shell: phalanx run -g 4 script.py": ("launch", "spawn"),
    "phalanx.main(train), where train(run) has the loop": ("fit", "init_process_group", "run"),
    "nothing: phalanx.main closes the run": ("destroy_process_group", "end", "end_training", "finish"),
}
OTHER = {name: typed for typed, names in _TYPED.items() for name in names}


def hint(name: str, group: WorkerProcessGroup) -> str:
    """Return what to type for a name that `Run` does not have. Empty: unknown."""
    owner: type
    if name in OTHER:
        return f". What you may mean: {OTHER[name]}"
    if name in dir(group):
        owner, what, where = WorkerProcessGroup, "process group", "run.group"
    elif hasattr(Wrapped, name):
        owner, what, where = Wrapped, "module that run.wrap returns", "ddp"
    else:
        return ""
    call = "()" if callable(getattr(owner, name, None)) else ""
    return f". The {what} has it: {where}.{name}{call}"
