"""What a worker is building, for people."""

from pathlib import Path

from rallypoint.daemon.shared.stages import read_stage, write_stage


def test_a_stage_is_that_of_one_life(tmp_path: Path) -> None:
    path = tmp_path / "1.stage"
    assert read_stage(path, 3) == "", "nothing was ever said"
    write_stage(path, 3, "waiting for the launch of process 7")
    assert read_stage(path, 3) == "waiting for the launch of process 7"
    assert read_stage(path, 4) == "", "it was said by the life before"
    write_stage(path, 3, "")
    assert read_stage(path, 3) == ""


def test_no_room_to_say_it_is_no_error(tmp_path: Path) -> None:
    write_stage(tmp_path / "no-such-directory" / "1.stage", 1, "importing")
