"""The power is cut while checkpoints of TensorFlow are published: what was promised is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from bundle_files import PUBLISHING, copy_bundle, write_value
from power_cut import Tried, cut_everywhere, swept_an_hour_later

from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import Family, Keep
from keras_safe_ckpt.storage.bundles.recovery import reading
from keras_safe_ckpt.storage.bundles.staging import stage

QUICK, THOROUGH = 6, 150
CKPT = Family("ckpt", bare=True)

MARKED = f"""{PUBLISHING}
MADE, FOLDER = sys.argv[-1], os.path.join(ROOT, "a", "place")

def save(value, keep, exactly=None):
    publish(FOLDER, f"{{MADE}}/{{value}}", exactly=exactly, keep=keep)
    mark(value)
"""
SCENES = {
    "first": """
mark("begin")
save(1, Keep(2))
save(2, Keep(2))
""",
    "pruned": """
save(1, Keep(1))
mark("begin")
mark(1)
for value in (2, 3):
    save(value, Keep(1))
""",
    "replaced": """
save(1, Keep(1), exactly="ckpt-1")
mark("begin")
mark(1)
for value in (2, 3):
    save(value, Keep(1), exactly="ckpt-1")
""",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    for value in range(1, 5):
        write_value(folder / str(value), value)
    return folder


def value_by_bytes(prefix: str, made: Path) -> int:
    """Every byte of index and data is that of one of them, whatever its checksums say."""
    found = [Path(f"{prefix}.{kind}").read_bytes() for kind in ("index", "data-00000-of-00001")]
    (value,) = [
        value
        for value in range(1, 5)
        if found
        == [(made / f"{value}.{kind}").read_bytes() for kind in ("index", "data-00000-of-00001")]
    ]
    return value


class BundleCheck:
    """The newest is the last that was promised or a later one, and TensorFlow's list names it."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __call__(self, disk: Path, done: list[str]) -> None:
        folder = disk / "a" / "place"
        if not done and not folder.exists():
            return
        place = BundleDirectory(folder)
        with reading(place):
            whole = [value_by_bytes(bundle.prefix, self._made) for bundle in place.whole(CKPT)]
        if done:
            assert whole[0] >= int(done[-1]), whole
            state = place.state()
            assert state is not None
            listed = list(state.listed)[-1]
            assert value_by_bytes(str(folder / listed), self._made) >= int(done[-1]), listed
        with stage(place, CKPT, 1) as staged:
            copy_bundle(self._made / "4", Path(staged.prefix))
            published = staged.publish(Keep(1))
        assert value_by_bytes(published.prefix, self._made) == 4
        assert value_by_bytes(next(place.whole(CKPT)).prefix, self._made) == 4
        assert swept_an_hour_later(folder)


def cut_bundles(scene: str, folder: Path, place: Path, made: Path, most: int) -> Tried:
    code = MARKED + SCENES[scene]
    return cut_everywhere(code, folder, BundleCheck(made), made, most=most, place=place)


@pytest.mark.parametrize("scene", SCENES)
def test_what_was_published_outlives_a_power_cut(tmp_path, place, made, scene):
    assert cut_bundles(scene, tmp_path, place, made, QUICK).states >= 10


@pytest.mark.campaign
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scene", SCENES)
def test_no_power_cut_takes_a_checkpoint_of_tensorflow(
    tmp_path, place, made, scene, record_property
):
    tried = cut_bundles(scene, tmp_path, place, made, THOROUGH)
    record_property("campaign", f"power cut, checkpoints of TensorFlow, {scene}: {tried}")
