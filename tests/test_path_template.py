"""File names with placeholders."""

from __future__ import annotations

import os

import pytest

from keras_safe_ckpt.storage.path_template import PathTemplate, aside_name, without_aside


def names(template: PathTemplate) -> list[str]:
    return [os.path.relpath(path) for path in template.existing()]


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(*paths: str) -> None:
        for path in paths:
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"")

    return make


def test_fields_are_the_names_it_asks_for():
    template = PathTemplate("a-{epoch:02d}-{val_loss:.2f}{{x}}{logs[0]}.keras")
    assert template.fields == {"epoch", "val_loss", "logs"}


def test_fill_formats_as_python_does():
    filled = PathTemplate("{epoch:02d}-{val_loss:.2f}-{{.keras").fill(
        {"epoch": 3, "val_loss": 0.125}
    )
    assert filled == "03-0.12-{.keras"


@pytest.mark.parametrize("text", ["{}.keras", "{0}.keras", "{epoch.keras", "epoch}.keras"])
def test_malformed_placeholders_are_refused(text):
    with pytest.raises(ValueError, match="Expected placeholders") as caught:
        PathTemplate(text)
    assert repr(text) in str(caught.value)


def test_a_metric_may_have_parts_and_any_format_of_a_number():
    template = PathTemplate("{f1[0]:.2f}-{loss:.3e}-{epoch:03d}-{acc!r:>8}.keras")
    template.refuse_unfit_placeholders()
    values = {"f1": [0.25], "loss": 0.5, "epoch": 7, "acc": 0.5}
    assert template.fill(values) == "0.25-5.000e-01-007-     0.5.keras"


def test_only_the_worker_is_filled_in_for_a_worker():
    template = PathTemplate("w{{}}{worker:03d}-{worker!s:>2}/{epoch:02d}-{a!r}.keras")
    assert template.for_worker(7).text == "w{{}}007- 7/{epoch:02d}-{a!r}.keras"


def test_folder_beside_the_file():
    assert PathTemplate("a/{epoch}.keras").in_folder("w").text == os.path.join(
        "a", "w", "{epoch}.keras"
    )


def test_existing_without_placeholders_is_the_file(files):
    files("best.keras", "other.keras")
    assert names(PathTemplate("best.keras")) == ["best.keras"]
    assert names(PathTemplate(os.path.abspath("best.keras"))) == ["best.keras"]
    assert names(PathTemplate("none.keras")) == []


def test_existing_counts_are_digits(files):
    files("01.keras", "12.keras", "best.keras", "01.weights.h5")
    assert names(PathTemplate("{epoch:02d}.keras")) == ["01.keras", "12.keras"]
    assert names(PathTemplate("{epoch}.keras")) == ["01.keras", "12.keras"]


def test_existing_metrics_are_anything(files):
    files("m-0.12.keras", "m--inf.keras", "x-0.1.keras")
    assert names(PathTemplate("m-{val_loss:.2f}.keras")) == ["m--inf.keras", "m-0.12.keras"]


def test_existing_looks_into_directories_with_placeholders(files):
    files("run/1/m.keras", "run/2/m.keras", "run/x/m.keras", "run/1/deep/m.keras")
    template = PathTemplate("run/{epoch}/m.keras")
    assert names(template) == ["run/1/m.keras", "run/2/m.keras"]
    assert template.deepest_fixed_directory() == "run"


def test_existing_treats_the_rest_literally(files):
    files("a+1.keras", "aa1.keras", "{1}.keras")
    assert names(PathTemplate("a+{epoch}.keras")) == ["a+1.keras"]
    assert names(PathTemplate("{{{epoch}}}.keras")) == ["{1}.keras"]


def test_directories_are_not_files(files):
    files("1.keras/x")
    assert names(PathTemplate("{epoch}.keras")) == []


def test_root_directory_is_absolute():
    assert PathTemplate("/{epoch}.keras").deepest_fixed_directory() == "/"


def test_metric_with_a_slash_in_its_name(files):
    template = PathTemplate("run/{head/loss:.1f}.keras")
    assert template.name == "{head/loss:.1f}.keras"
    assert template.parent.text == "run"
    assert template.fill({"head/loss": 0.25}) == "run/0.2.keras"
    files("run/0.2.keras")
    assert names(template) == ["run/0.2.keras"]


@pytest.mark.parametrize("text", ["{epoch:<4d}x", "{epoch:+d}", "{epoch:*>4d}", "{epoch:x}"])
def test_existing_with_other_ways_to_write_a_count(files, text):
    template = PathTemplate(f"{text}.keras")
    files(template.fill({"epoch": 12}))
    assert len(template.existing()) == 1


def test_template_below_a_directory_with_braces():
    assert PathTemplate("{epoch}.keras").below("/a{b}").fill({"epoch": 1}) == "/a{b}/1.keras"


def test_counts_alone():
    template = PathTemplate("{epoch:02d}-{loss}-{epoch}")
    assert template.count_text("epoch", 3) == "033"
    assert template.count_text("batch", 3) == ""


def test_files_that_were_set_aside_are_found(files):
    assert aside_name("03.weights.h5", 2) == "03~2.weights.h5"
    assert aside_name("a.b.keras", 3) == "a.b~3.keras"
    assert without_aside("03~2.weights.h5") == "03.weights.h5"
    assert without_aside("03~x.keras") == "03~x.keras"
    files("03.keras", "03~2.keras")
    assert names(PathTemplate("{epoch:02d}.keras")) == ["03.keras", "03~2.keras"]


def test_series_of_any_worker():
    template = PathTemplate("{worker:02d}-{epoch}.keras")
    assert template.is_series("07-{epoch}.keras")
    assert not template.is_series("x-{epoch}.keras")
    assert PathTemplate("a+{epoch}.keras").is_series("a+{epoch}.keras")
    assert not PathTemplate("{epoch}.keras").is_series("best.keras")


def test_obstacles_are_what_is_no_file(files, tmp_path):
    files("1.keras", "2.keras/x")
    (tmp_path / "3.keras").symlink_to("1.keras")
    obstacles = [path.name for path in PathTemplate("{epoch}.keras").obstacles()]
    assert obstacles == ["2.keras", "3.keras"]
