"""A small Llama under Hugging Face's Trainer, and X-gram tables at its attention values through a callback.

pip install accelerate 'transformers>=4.57,<5'
torchrun --nproc-per-node 2 docs/examples/hf_trainer.py
"""

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from xgram_dist.library import TableSites, TokenTables

VOCABULARY, LENGTH, STEPS = 256, 64, 30


class TablesCallback(TrainerCallback):
    """Gives each forward pass its rows; at the end of a step, returns gradients, clips model and tables by their joint
    norm (so set max_grad_norm=0) and updates the tables; saves each rank's tables in the Trainer's checkpoints."""

    def __init__(self, model, sites, tables, max_norm=1.0):
        self.sites, self.tables, self.max_norm = sites, tables, max_norm
        model.register_forward_pre_hook(self.before_forward, with_kwargs=True)

    def before_step(self, micro_batches):
        self.rows = self.tables.fetch(self.tables.plan(*micro_batches))
        self.slots = iter(self.rows.slots)

    def before_forward(self, model, args, inputs):
        if model.training:
            self.sites.use(self.rows.values, next(self.slots))
        else:
            rows = self.tables.fetch(self.tables.plan(inputs["input_ids"].cpu()), training=False)
            self.sites.use(rows.values, rows.slots[0])

    def on_pre_optimizer_step(self, args, state, control, *, model, optimizer, **kwargs):
        self.tables.give_back(self.rows)
        self.tables.clip(model.parameters(), self.max_norm)
        if not self.tables.step(5 * optimizer.param_groups[0]["lr"]):
            optimizer.zero_grad()  # not finite: without gradients the step changes nothing

    def on_save(self, args, state, control, **kwargs):
        torch.save(self.tables.state_dict(), self.folder(args, state) / f"tables-{args.process_index}.pt")

    def on_train_begin(self, args, state, control, **kwargs):  # of resume_from_checkpoint=True, on any number of ranks
        if state.global_step:
            files = sorted(self.folder(args, state).glob("tables-*.pt"))
            self.tables.load_state_dict([torch.load(file, mmap=True, weights_only=True) for file in files])

    def folder(self, args, state):
        return Path(args.output_dir) / f"checkpoint-{state.global_step}"


class TablesTrainer(Trainer):
    def __init__(self, *args, tables, **settings):
        super().__init__(*args, callbacks=[tables], **settings)
        self.tables = tables

    def get_batch_samples(self, *args):  # all micro-batches of a step
        batches, num_items = super().get_batch_samples(*args)
        self.tables.before_step([batch["input_ids"].cpu() for batch in batches])
        return batches, num_items


def build_model():
    torch.manual_seed(0)
    config = LlamaConfig(VOCABULARY, 64, 128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config)
    return model, TableSites({f"layers.{n}.v": block.self_attn.v_proj for n, block in enumerate(model.model.layers)})


def build_data():
    text = torch.frombuffer(bytearray(Path(torch.__file__).read_bytes()), dtype=torch.uint8).long()
    windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    labels = windows.clone()
    labels[:, 0] = -100  # nothing predicts the first token, but the Trainer would count it
    return [{"input_ids": tokens, "labels": label} for tokens, label in zip(windows, labels, strict=True)]


def main(folder=None, **settings):
    """`folder`: where a run saves, and from whose newest checkpoint it goes on."""
    defaults = {
        "output_dir": folder or tempfile.mkdtemp(),
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 2e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,  # the callback clips
        "logging_steps": 10,
        "eval_strategy": "steps",
        "save_strategy": "no" if folder is None else "steps",
        "use_cpu": not torch.cuda.is_available(),
        "ddp_find_unused_parameters": False,
        "disable_tqdm": True,
        "report_to": [],
    }
    model, sites = build_model()
    data = build_data()
    with TokenTables(sites.widths, VOCABULARY) as tables:
        trainer = TablesTrainer(
            model,
            TrainingArguments(**(defaults | settings)),
            train_dataset=data[:-16],
            eval_dataset=data[-16:],
            tables=TablesCallback(model, sites, tables),
        )
        trainer.train(resume_from_checkpoint=folder is not None and any(Path(folder).glob("checkpoint-*")))
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


if __name__ == "__main__":
    main()
