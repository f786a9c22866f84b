# type: ignore  # of libraries that are not installed where this is checked
"""Writes the checkpoints of this folder with Lightning 2.6.6 and torch 2.13, on the CPU."""

import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.lin = torch.nn.Linear(4, 3)
        self.register_buffer("scale", torch.arange(3.0))


class Task(pl.LightningModule):
    """Holds the model in the attribute 'model', with hyperparameters that are an object."""

    def __init__(self, rate: float, where: object) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Net()

    def training_step(self, batch, _):
        (x,) = batch
        return self.model.lin(self.model.embed(x)).square().mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.rate)


class Encoder(Task):
    """The model in an attribute of another name, and a second one beside it."""

    def __init__(self, rate: float, where: object) -> None:
        super().__init__(rate, where)
        self.teacher = Net()
        self.teacher.requires_grad_(False)


def main(out: Path) -> None:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.arange(7)), batch_size=7)
    for name, kind in (("task", Task), ("two", Encoder)):
        task = kind(0.01, Path("somewhere"))
        trainer = pl.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task, data)
        trainer.save_checkpoint(out / f"{name}.ckpt")
        torch.save(task.model.state_dict(), out / f"{name}_truth.pt")


main(Path(sys.argv[1]))
