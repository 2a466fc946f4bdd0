"""Loss curves of runs as a picture."""

from pathlib import Path

from xgram_dist.errors import UserError
from xgram_dist.report.runs import Run

KINDS = (".png", ".svg", ".pdf")


def draw_losses(runs: list[Run], file: Path) -> None:
    """Training loss (thin) and validation loss (dots) against tokens, one colour a run."""
    if file.suffix.lower() not in KINDS:
        raise UserError(f"picture '{file}' must end in {', '.join(KINDS)}")
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=130)
    for number, run in enumerate(runs):
        millions = run.config.train.global_batch * run.config.model.sequence_length / 1e6
        colour = f"C{number}"
        points = [r for r in run.train if r["cross_entropy"] is not None]
        axes.plot([r["step"] * millions for r in points], [r["cross_entropy"] for r in points], colour, lw=1, alpha=0.6)
        checks = [r for r in run.validation if r["loss"] is not None]
        label = run.config.name
        if checks and checks[-1]["perplexity"] is not None:
            label += f": validation perplexity {checks[-1]['perplexity']:.2f}"
        axes.plot(
            [r["step"] * millions for r in checks],
            [r["loss"] for r in checks],
            colour,
            marker="o",
            ms=5,
            lw=1.8,
            label=label,
        )
    axes.set_xlabel("million tokens")
    axes.set_ylabel("cross-entropy (nats a token)")
    axes.set_title("Loss: training (thin) and validation (dots)")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.tight_layout()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot write the picture '{file}': {error}") from None
    finally:
        plt.close(figure)
