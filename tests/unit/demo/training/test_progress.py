"""What the demo reads of a rank's file."""

from pathlib import Path

from tiercheck.demo.training.progress import ProgressWriter, progress_path, read_progress


def test_a_run_that_had_nothing_left_to_train_has_captured_a_base_as_well(tmp_path: Path) -> None:
    path = progress_path(tmp_path, 0)
    writer = ProgressWriter(path)
    assert (read_progress(path).captured, read_progress(path).folded) == (0, 0)
    writer.step(24, 1.0, 0.1, 0.0, captured=1, folded=2)
    assert (read_progress(path).captured, read_progress(path).folded) == (1, 2), "it may be killed from here on"
    other = progress_path(tmp_path, 1)
    ProgressWriter(other).write("finished", digest={}, drain_s=0.0, captured=1, folded=3)
    assert (read_progress(other).captured, read_progress(other).folded) == (1, 3)
