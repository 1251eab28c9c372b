"""What the demo reads of a rank's file."""

from pathlib import Path

from tiercheck.demo.training.progress import ProgressWriter, progress_path, read_progress


def test_a_rank_goes_on_with_its_first_step_or_if_no_step_is_left(tmp_path: Path) -> None:
    seen = []
    for rank, trains in enumerate((True, False)):
        path = progress_path(tmp_path, rank)
        writer = ProgressWriter(path)
        writer.write("started", version=24)
        seen.append(read_progress(path).goes_on)
        if trains:
            writer.step(25, 1.0, 0.1, 0.0)
        else:
            writer.write("finished", digest={}, drain_s=0.0)
        seen.append(read_progress(path).goes_on)
    assert seen == [False, True, False, True]


def test_a_run_that_had_nothing_left_to_train_has_captured_a_base_as_well(tmp_path: Path) -> None:
    path = progress_path(tmp_path, 0)
    writer = ProgressWriter(path)
    assert (read_progress(path).captured, read_progress(path).folded) == (0, 0)
    writer.step(24, 1.0, 0.1, 0.0, captured=1, folded=2)
    assert (read_progress(path).captured, read_progress(path).folded) == (1, 2), "it may be killed from here on"
    other = progress_path(tmp_path, 1)
    ProgressWriter(other).write("finished", digest={}, drain_s=0.0, captured=1, folded=3)
    assert (read_progress(other).captured, read_progress(other).folded) == (1, 3)
