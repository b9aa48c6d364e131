"""The folder of a running mesh: orphans are told by their locks."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from pagemesh.cli.client_config import ClientConfig
from pagemesh.cli.gateway_url import client_config
from pagemesh.cli.mesh import run_folder as run_folder_module
from pagemesh.cli.mesh.run_folder import (
    GATEWAY,
    LOCK_NAME,
    check_owner,
    has_damaged_secret,
    orphan_pool_bytes,
    put_back,
    run_folder,
    running_folders,
    running_urls,
    url_file_name,
)
from pagemesh.cli.operator import bus_config
from pagemesh.kernels.native.locks import holder_is_dead
from pagemesh.pager.storage.disk_file import DiskPlace
from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.errors import ConfigError


def orphan(base: Path, name: str, *files: str) -> Path:
    folder = base / name
    folder.mkdir(parents=True, mode=0o700)
    for file in (LOCK_NAME, *files):
        (folder / file).write_text("x")
    return folder


def test_the_folder_is_private_and_gone_afterwards(tmp_path: Path) -> None:
    with run_folder(tmp_path / "pools", "host") as folder:
        assert folder.path.stat().st_mode & 0o077 == 0
        assert (folder.path / LOCK_NAME).stat().st_mode & 0o077 == 0
        (folder.path / "host.pool").write_bytes(b"pages")
    assert list((tmp_path / "pools").iterdir()) == []


def test_two_running_meshes_do_not_share_a_folder(tmp_path: Path) -> None:
    with run_folder(tmp_path, "host") as one, run_folder(tmp_path, "host") as two:
        assert one.path != two.path
        assert not two.adopted


def test_a_folder_that_somebody_has_emptied_is_found_again_and_ours(tmp_path: Path) -> None:
    base = tmp_path / "pools"
    with run_folder(base, "host") as folder:
        files = {folder.path / "operator.url": "nats://there\n"}
        folder.keep(files)
        kept = folder.lock
        folder.keep(files)
        assert folder.lock == kept, "it is there"
        shutil.rmtree(base)
        assert running_urls(base, "operator") == {}
        folder.keep(files)
        assert running_urls(base, "operator") == dict.fromkeys(files, "nats://there")
        (folder.path / "host.pool").write_bytes(b"pages")
        with run_folder(base, "host") as other:
            assert other.path != folder.path, "it was not taken for an orphan"
    assert not any(base.iterdir())


def test_what_is_put_back_is_for_nobody_else_whatever_the_umask(tmp_path: Path) -> None:
    base, before = tmp_path / "pools", os.umask(0o002)
    try:
        with run_folder(base, "host") as folder:
            shutil.rmtree(base)
            folder.keep({folder.path / "operator.url": "nats://there\n"})
            for place in (base, folder.path):
                assert place.stat().st_mode & 0o077 == 0
    finally:
        os.umask(before)


def test_nothing_is_put_back_where_others_may_write(tmp_path: Path) -> None:
    base = tmp_path / "pools"
    with run_folder(base, "host") as folder:
        shutil.rmtree(base)
        base.mkdir()
        base.chmod(0o777)
        files = {folder.path / "operator.url": "nats://there\n"}
        for put in (folder.keep, put_back):
            with pytest.raises(ConfigError, match="must be yours and writable by nobody else"):
                put(files)
        assert not any(base.rglob("*"))


def test_a_folder_that_another_mesh_has_by_now_is_left_to_it(tmp_path: Path) -> None:
    base = tmp_path / "pools"
    with run_folder(base, "host") as folder:
        shutil.rmtree(folder.path)
        folder.path.mkdir(mode=0o700)
        other = os.open(folder.path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another `pagemesh up` has it"):
            folder.keep({folder.path / "operator.url": "nats://there\n"})
        assert [path.name for path in folder.path.iterdir()] == [LOCK_NAME]
    assert folder.path.exists()
    os.close(other)


def test_an_orphan_with_a_pool_is_adopted_with_its_pins_and_its_secret(tmp_path: Path) -> None:
    pager = ("host.pool", "host.holders", "host.pins", "host.retired")
    files = (*pager, "secret", "nats-server.conf", "w.lock")
    left = orphan(tmp_path, "up-old", *files)
    with run_folder(tmp_path, "host") as folder:
        assert folder.adopted and folder.path == left
        assert folder.secret() == "x"
        kept = {LOCK_NAME, *pager, "secret"}
        assert {path.name for path in left.iterdir()} == kept


def test_further_orphans_and_those_without_a_pool_are_removed(tmp_path: Path) -> None:
    orphan(tmp_path, "up-a", "secret")
    orphan(tmp_path, "up-b", "host.pool")
    orphan(tmp_path, "up-c", "host.pool")
    with run_folder(tmp_path, "host") as folder:
        assert (folder.path.name, folder.removed_count) == ("up-b", 2)
        assert [path.name for path in tmp_path.iterdir()] == ["up-b"]


def test_a_pool_of_another_host_is_not_kept_in_memory_that_its_own_may_need(
    tmp_path: Path,
) -> None:
    orphan(tmp_path, "up-a", "other.pool", "other.holders", "secret")
    left = orphan(tmp_path, "up-b", "other.pool", "other.pins", "host.pool", "secret")
    with run_folder(tmp_path, "host") as folder:
        assert (folder.path, folder.adopted, folder.removed_count) == (left, True, 1)
        assert {path.name for path in left.iterdir()} == {LOCK_NAME, "host.pool", "secret"}
    orphan(tmp_path, "up-c", "other.pool")
    with run_folder(tmp_path, "host") as folder:
        assert not folder.adopted and not (tmp_path / "up-c").exists()


def test_pages_that_a_killed_mesh_kept_in_memory_are_room_for_the_next(tmp_path: Path) -> None:
    left = orphan(tmp_path, "up-old", "host.pool")
    pages = DiskPlace(left, "host", 1 << 20, b"", "memory").path("pages")
    pages.write_bytes(bytes(1 << 20))
    assert orphan_pool_bytes(tmp_path) >= 1 << 20
    with run_folder(tmp_path, "host") as folder:
        assert folder.adopted and not pages.exists()


def test_a_folder_whose_pool_is_still_locked_is_left_alone(tmp_path: Path) -> None:
    left = orphan(tmp_path, "up-old", "host.pool")
    holder = os.open(left / "host.pool", os.O_RDWR)
    fcntl.flock(holder, fcntl.LOCK_EX)
    try:
        with run_folder(tmp_path, "host") as folder:
            assert folder.path != left
        assert (left / "host.pool").exists()
        assert orphan_pool_bytes(tmp_path) == 0, "nobody may take its room"
    finally:
        os.close(holder)
    assert orphan_pool_bytes(tmp_path) > 0


def test_a_folder_that_is_being_removed_is_no_orphan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = shutil.rmtree
    begins = ThreadPoolExecutor(1)

    def next_mesh() -> tuple[str, bool]:
        with run_folder(tmp_path, "host") as folder:
            return folder.path.name, folder.adopted

    def slowly(path: Path, ignore_errors: bool) -> None:
        monkeypatch.setattr(shutil, "rmtree", remove)
        (path / LOCK_NAME).unlink()
        later.append(begins.submit(next_mesh))
        time.sleep(0.2)
        assert not later[0].done(), "it waits for its turn"
        remove(path, ignore_errors=ignore_errors)

    later: list[Future[tuple[str, bool]]] = []
    with begins:
        with run_folder(tmp_path, "host") as folder:
            (folder.path / "host.pool").touch()
            monkeypatch.setattr(shutil, "rmtree", slowly)
        name, adopted = later[0].result()
        assert name != folder.path.name and not adopted
    assert list(tmp_path.iterdir()) == []


def test_a_mesh_whose_folder_goes_while_it_is_looked_at_runs_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_folder(tmp_path, "host") as folder:
        monkeypatch.setattr(run_folder_module, "running_folders", lambda _base: [folder.path])
        monkeypatch.setattr(Path, "is_file", lambda _file: True)  # as it was a moment ago
        assert running_urls(tmp_path, GATEWAY) == {}, "it has just begun, or ended"
        file = folder.path / url_file_name(GATEWAY)
        file.touch()
        assert running_urls(tmp_path, GATEWAY) == {}, "it is being written"
        file.write_text("http://127.0.0.1:1\n")
        assert running_urls(tmp_path, GATEWAY) == {file: "http://127.0.0.1:1"}
    assert running_urls(tmp_path, GATEWAY) == {}


def test_a_look_at_who_runs_is_never_taken_for_a_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan(tmp_path, "up-old", "host.pool")
    base = os.open(tmp_path, os.O_RDONLY)

    def locks_nobody_out(lock: Path) -> bool:
        with pytest.raises(BlockingIOError):  # who starts waits for its turn
            fcntl.flock(base, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return holder_is_dead(lock)

    monkeypatch.setattr(run_folder_module, "holder_is_dead", locks_nobody_out)
    try:
        assert running_folders(tmp_path) == []
        with run_folder(tmp_path, "host") as folder:
            assert running_folders(tmp_path) == [folder.path]
    finally:
        os.close(base)
    assert running_folders(tmp_path / "nowhere") == []


def test_the_secret_is_random_long_and_readable_by_its_owner_only(tmp_path: Path) -> None:
    with run_folder(tmp_path, "host") as one, run_folder(tmp_path, "host") as two:
        assert len(one.secret()) == 64
        assert one.secret() == one.secret() != two.secret()
        assert (one.path / "secret").stat().st_mode & 0o077 == 0


def test_a_secret_that_a_full_disk_left_empty_is_made_anew(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (disk / "secret").touch()
    with run_folder(tmp_path / "one", "host") as one, run_folder(tmp_path / "two", "host") as two:
        secret = one.secret(disk)
        assert len(secret) == 64
        assert two.secret(disk) == secret, "the next mesh reads the same disk"
    assert [path.name for path in disk.iterdir()] == ["secret"]
    assert (disk / "secret").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("damaged", [b"\xff\xfe", bytes(64), b"ab\ncd"])
def test_a_secret_that_a_loss_of_power_damaged_is_made_anew(
    tmp_path: Path, damaged: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    disk = tmp_path / "disk"
    disk.mkdir()
    assert not has_damaged_secret(disk), "there is none yet"
    (disk / "secret").write_bytes(damaged)
    assert has_damaged_secret(disk)
    with run_folder(tmp_path / "one", "host") as one:
        (one.path / "secret").write_bytes(damaged)
        secret = one.secret(disk)
        assert re.fullmatch("[0-9a-f]{64}", secret)
        assert secret == (disk / "secret").read_text() == (one.path / "secret").read_text()
    assert not has_damaged_secret(disk)
    assert len(synced) == 2, "before it takes the old one's place"


def test_a_secret_that_cannot_be_written_leaves_nothing_for_the_next_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / "disk"
    with run_folder(tmp_path / "one", "host") as one:
        in_run_folder = one.secret()

        def cut_short(path: Path, text: str) -> None:
            path.write_text(text[:7])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(run_folder_module, "write_private", cut_short)
            assert one.secret(disk) == in_run_folder
        assert list(disk.iterdir()) == []
        assert len(one.secret(disk)) == 64


def test_two_meshes_that_begin_at_once_with_one_disk_have_one_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = run_folder_module.write_private

    def slowly(path: Path, text: str) -> None:
        time.sleep(0.1)
        write(path, text)

    monkeypatch.setattr(run_folder_module, "write_private", slowly)
    disk = tmp_path / "disk"
    with run_folder(tmp_path / "one", "host") as one, run_folder(tmp_path / "two", "host") as two:
        with ThreadPoolExecutor(2) as threads:
            said = list(threads.map(lambda folder: folder.secret(disk), (one, two)))
        assert said[0] == said[1] == one.secret(disk)


def test_an_adopted_pool_stays_warm_when_a_disk_is_given_to_it_and_when_it_is_taken_away(
    tmp_path: Path,
) -> None:
    orphan(tmp_path, "up-old", "host.pool", "secret")
    disk = tmp_path / "disk"
    with run_folder(tmp_path, "host") as folder:
        assert folder.secret(disk) == "x" == (disk / "secret").read_text()
    with run_folder(tmp_path, "host") as other:
        assert other.secret(disk) == "x"
        (other.path / "host.pool").touch()
        assert other.secret() == "x"


def test_a_pool_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "pools"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(ConfigError, match="PAGEMESH_POOL_DIR"), run_folder(open_to_all, "host"):
        pass
    with pytest.raises(ConfigError, match=r"\(--pool-dir\): must be yours"):
        check_owner(open_to_all)
    check_owner(tmp_path / "not" / "there" / "yet")


def test_a_file_that_is_named_as_a_folder_of_a_mesh_is_none(tmp_path: Path) -> None:
    (tmp_path / "up-notes.txt").touch()
    assert orphan_pool_bytes(tmp_path) == 0 and running_folders(tmp_path) == []
    with run_folder(tmp_path, "host") as folder:
        assert not folder.adopted
    assert [path.name for path in tmp_path.iterdir()] == ["up-notes.txt"]


def test_where_no_folder_can_be_no_mesh_runs(tmp_path: Path) -> None:
    nowhere = tmp_path / ("n" * 300)
    assert orphan_pool_bytes(nowhere) == 0 and running_folders(nowhere) == []
    with pytest.raises(ConfigError, match=r"\(--pool-dir\): file name too long"):
        check_owner(nowhere)


def test_a_pool_folder_that_is_a_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "pools"
    file.write_text("no folder")
    with pytest.raises(ConfigError, match="PAGEMESH_POOL_DIR"), run_folder(file, "host"):
        pass


@pytest.mark.parametrize("written", ["http://127.0.0.1:8102", "http://localhost:8102/v1/"])
def test_who_names_the_gateway_of_a_mesh_has_named_its_server_and_the_other_way_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str
) -> None:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path))
    servers = [f"nats://o:pw@127.0.0.1:{port}" for port in (1, 2)]
    gateways = [f"http://127.0.0.1:{port}" for port in (8101, 8102)]
    with run_folder(tmp_path, "host") as one, run_folder(tmp_path, "host") as two:
        for folder, server, gateway in zip((one, two), servers, gateways, strict=True):
            (folder.path / url_file_name("operator")).write_text(server + "\n")
            (folder.path / url_file_name(GATEWAY)).write_text(gateway + "\n")
        assert bus_config({"pagemesh_url": written}).url == servers[1]
        assert client_config({"pagemesh_nats": servers[0]}).url == gateways[0]
        for plain in ("nats://localhost:2", "nats://127.0.0.1:2", "127.0.0.1:2"):
            assert client_config({"pagemesh_nats": plain}).url == gateways[1]
        with pytest.raises(ConfigError, match="2 meshes run here"):
            bus_config({})
        with pytest.raises(ConfigError, match="no URL"):
            bus_config({"pagemesh_url": "http://127.0.0.1:port"})
        monkeypatch.setenv("PAGEMESH_URL", gateways[0])
        assert bus_config({}).url == servers[0]
        monkeypatch.delenv("PAGEMESH_URL")
        monkeypatch.setenv("PAGEMESH_NATS", servers[1])
        assert client_config({}).url == gateways[1]


def test_who_names_another_mesh_than_those_here_gets_none_of_these(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGEMESH_POOL_DIR", str(tmp_path))
    server, gateway = "nats://o:pw@127.0.0.1:1", "http://127.0.0.1:8101"
    with run_folder(tmp_path, "host") as one, run_folder(tmp_path, "host") as starting:
        (one.path / url_file_name("operator")).write_text(server + "\n")
        (one.path / url_file_name(GATEWAY)).write_text(gateway + "\n")
        (starting.path / url_file_name(GATEWAY)).write_text("http://127.0.0.1:8102\n")
        assert bus_config({}).url == server
        for other in ("http://10.0.0.9:8101", "http://127.0.0.1:8102"):
            assert bus_config({"pagemesh_url": other}).url == BusConfig().url
        assert client_config({"pagemesh_nats": "nats://10.0.0.9:1"}).url == ClientConfig().url
