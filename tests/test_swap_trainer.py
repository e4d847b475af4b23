"""Whole runs of the Hugging Face Trainer and of Accelerate, with whet and without: the same losses, metrics and checkpoints."""

import pytest
import torch
from swapping import batch, built

import whet

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: neither it nor the Trainer is tried")


class Rows(torch.utils.data.Dataset):
    """Random tokens, of which each row's loss counts another number."""

    def __init__(self, count: int = 16):
        self.ids = torch.randint(3, 96, (count, 24), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict:
        labels = self.ids[i].clone()
        labels[: i % 7] = -100
        return dict(input_ids=self.ids[i], labels=labels)


def run(folder, callbacks=(), model=None, resume=None, steps: int = 4, **options):
    """Losses of a short run, metrics of an evaluation, predictions, and the trainer."""
    args = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="steps", save_steps=2, lr_scheduler_type="constant", **options,
    )
    trainer = transformers.Trainer(
        built("Llama", torch.float32) if model is None else model, args, train_dataset=Rows(), eval_dataset=Rows(4),
        compute_metrics=lambda p: {"mean": float(p.predictions.mean())}, callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    metrics = {k: v for k, v in trainer.evaluate().items() if k in ("eval_loss", "eval_mean")}
    metrics = {k: torch.tensor(v) for k, v in metrics.items()}
    return torch.tensor(losses), metrics, torch.tensor(trainer.predict(Rows(4)).predictions), trainer


def same(one, other) -> None:
    """Losses, metrics and predictions: as close as float32 has it."""
    assert len(one[0]) >= 4 and len(one[1]) == 2
    for got, expected in zip(one[:3], other[:3]):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [
    {}, {"gradient_accumulation_steps": 2}, {"label_smoothing_factor": 0.1}, {"gradient_checkpointing": True},
], ids=["plain", "accumulated", "smoothed", "checkpointed"])
def test_a_run_with_the_callback_has_the_losses_metrics_and_predictions_of_one_without(options, tmp_path, swapped_at_once):
    expected = run(tmp_path / "plain", **options)
    got = run(tmp_path / "optimised", [whet.TrainerCallback()], **options)
    assert sum(len(g.sites) for g in got[3].model.whet.kept) == 13 and not hasattr(expected[3].model, "whet")
    same(got, expected)


def test_a_run_that_goes_on_from_a_checkpoint_is_the_run_that_was_not_interrupted(tmp_path, swapped_at_once):
    expected = run(tmp_path / "plain", steps=6)
    run(tmp_path / "optimised", [whet.TrainerCallback()])
    again = [whet.TrainerCallback(restore=True)]
    got = run(tmp_path / "optimised", again, resume=str(tmp_path / "optimised" / "checkpoint-4"), steps=6)
    same(got, expected)
    assert not hasattr(got[3].model, "whet")


def test_a_model_optimised_before_its_trainer_is_made_keeps_the_columns_of_its_dataset(tmp_path, swapped_at_once):
    expected = run(tmp_path / "plain", gradient_accumulation_steps=2)
    model = whet.optimize(built("Llama", torch.float32), batch())
    got = run(tmp_path / "optimised", model=model, gradient_accumulation_steps=2)
    same(got, expected)
    assert got[3].model_accepts_loss_kwargs
    got[3]._set_signature_columns_if_needed()
    assert {"input_ids", "labels", "attention_mask"} <= set(got[3]._signature_columns)


def accelerated(optimised: bool) -> list[float]:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model = built("Llama", torch.float32)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3), loader)
    if optimised:
        whet.optimize(accelerator.unwrap_model(model), next(iter(loader)))
        assert len(accelerator.unwrap_model(model).whet.kept) == 7
    losses = []
    for data in loader:
        with accelerator.accumulate(model):
            loss = model(**data).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def test_a_loop_of_accelerate_has_the_same_losses(swapped_at_once):
    expected = accelerated(False)
    assert len(expected) == 8
    torch.testing.assert_close(torch.tensor(accelerated(True)), torch.tensor(expected))
