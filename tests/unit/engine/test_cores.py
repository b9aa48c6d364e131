"""How many threads a step gets: a core each, and none more than the CPU quota pays for."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from pagemesh.cli.doctor import examine
from pagemesh.engine import cores
from pagemesh.engine.cores import UsableCores, cpu_quota
from pagemesh.engine.worker.stepper import bounded_threads


@dataclass(frozen=True, slots=True)
class Groups:
    """Control groups as a kernel shows them, made of files."""

    folder: Path

    @property
    def own(self) -> Path:
        return self.folder / "own"

    @property
    def mounts(self) -> Path:
        return self.folder / "mounts"

    def quota(self) -> float:
        return cpu_quota(self.own, self.mounts)

    def write(self, name: str, text: str) -> None:
        path = self.mounts / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    (tmp_path / "own").write_text("0::/a.slice/b.service\n")
    return Groups(tmp_path)


def test_the_quota_is_that_of_the_own_group(groups: Groups) -> None:
    groups.write("a.slice/b.service/cpu.max", "250000 100000")
    groups.write("a.slice/other.service/cpu.max", "100000 100000")
    assert groups.quota() == 2.5


def test_a_group_has_no_more_than_any_group_above_it(groups: Groups) -> None:
    groups.write("a.slice/b.service/cpu.max", "800000 100000")
    groups.write("a.slice/cpu.max", "150000 50000")
    assert groups.quota() == 3
    groups.write("cpu.max", "200000 100000")
    assert groups.quota() == 2


def test_without_a_quota_there_is_no_bound(groups: Groups) -> None:
    assert groups.quota() == math.inf, "no group has the file"
    groups.write("a.slice/b.service/cpu.max", "max 100000")
    assert groups.quota() == math.inf
    groups.own.unlink()
    assert groups.quota() == math.inf, "a kernel without control groups"


def test_the_first_version_of_groups_has_quotas_too(groups: Groups) -> None:
    groups.own.write_text("9:name=systemd:/x\n4:cpu,cpuacct:/docker/f00\n3:cpuset:/\n0::/\n")
    groups.write("cpu/docker/f00/cpu.cfs_quota_us", "400000")
    groups.write("cpu/docker/f00/cpu.cfs_period_us", "100000")
    assert groups.quota() == 4
    groups.write("cpu/docker/f00/cpu.cfs_quota_us", "-1")
    assert groups.quota() == math.inf


def test_a_container_sees_its_own_group_at_the_top_whatever_its_path_says(groups: Groups) -> None:
    groups.own.write_text("4:cpu,cpuacct:/docker/f00\n")
    groups.write("cpu/cpu.cfs_quota_us", "50000")
    groups.write("cpu/cpu.cfs_period_us", "100000")
    assert groups.quota() == 0.5


def test_a_path_that_leads_out_of_what_is_mounted_is_not_followed(groups: Groups) -> None:
    groups.own.write_text("0::/../b.service\n")
    groups.folder.joinpath("b.service").mkdir()
    groups.folder.joinpath("b.service/cpu.max").write_text("100000 100000\n")
    assert groups.quota() == math.inf


@pytest.mark.parametrize(
    ("own_count", "quota", "thread_count"),
    [(32, math.inf, 32), (32, 2.0, 2), (32, 2.9, 2), (32, 0.5, 1), (2, 8.0, 2), (1, 1.0, 1)],
)
def test_there_are_no_more_threads_than_cores_or_than_the_quota_pays_for_in_full(
    own_count: int, quota: float, thread_count: int
) -> None:
    assert UsableCores(32, own_count, quota).thread_count == thread_count


def test_cores_are_told_as_they_count() -> None:
    assert str(UsableCores(8, 8, math.inf)) == "8 cores"
    assert str(UsableCores(1, 1, math.inf)) == "1 core"
    assert str(UsableCores(32, 4, math.inf)) == "4 of 32 cores"
    assert str(UsableCores(32, 32, 2.5)) == "2 of 32 cores, the CPU quota allows 2.5"
    assert str(UsableCores(4, 4, 6.0)) == "4 cores"


def test_doctor_tells_the_cores_as_they_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(32)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: 2.0)
    found = {finding.topic: finding.text for finding in examine({})}
    assert found["limits"].endswith(" open files, 2 of 32 cores, the CPU quota allows 2")


def test_a_step_uses_what_the_quota_allows_unless_a_number_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert bounded_threads(0) <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(cores, "cpu_quota", lambda: 1.5)
    assert bounded_threads(0) == 1
    assert bounded_threads(3) == 3
