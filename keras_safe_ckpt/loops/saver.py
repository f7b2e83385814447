"""`SafeSaver`: the Saver of TensorFlow 1, for any number of threads and processes."""

from __future__ import annotations

import os
import threading
from typing import Any

import tensorflow as tf

from keras_safe_ckpt.loops.file_errors import file_errors
from keras_safe_ckpt.loops.save_counter import whole_number
from keras_safe_ckpt.storage.bundles.bundle import Bundle
from keras_safe_ckpt.storage.bundles.directory import BundleDirectory
from keras_safe_ckpt.storage.bundles.family import Family, Keep
from keras_safe_ckpt.storage.bundles.recovery import reading
from keras_safe_ckpt.storage.bundles.staging import StagedBundle, stage
from keras_safe_ckpt.storage.bundles.state_file import DEFAULT_NAME
from keras_safe_ckpt.storage.lock_backend import Locks
from keras_safe_ckpt.storage.locks import chosen_locks

_Saver: Any = tf.compat.v1.train.Saver
_V1, _V2 = tf.compat.v1.train.SaverDef.V1, tf.compat.v1.train.SaverDef.V2


class SafeSaver(_Saver):  # type: ignore[misc]
    """`tf.compat.v1.train.Saver` for any number of threads and processes in one directory.

    The arguments and methods are those of TensorFlow, and ``locks``. Two that save under one name
    take turns: the later one stays, whole. The checkpoints of one ``save_path`` count together for
    ``max_to_keep``, whoever has saved them.

    Args:
        var_list: the variables, as a list or by name; None takes all that can be saved.
        reshape: restore into other shapes with as many elements, too.
        sharded: write a data file for each device.
        max_to_keep: how many stay; None or 0 keeps all.
        keep_checkpoint_every_n_hours: one of each so many hours stays beyond that.
        name: what the names of its operations in the graph begin with.
        restore_sequentially: restore the variables of a device one after another.
        saver_def: a ``SaverDef`` that says all this, in place of the arguments.
        builder: a ``SaverBuilder`` that makes the operations.
        defer_build: make them when ``build()`` is called.
        allow_empty: no variables are no error; nothing is saved then.
        write_version: ``SaverDef.V2``; files of version 1 have no checksums and are refused.
        pad_step_number: write the step with eight digits.
        save_relative_paths: is True, whatever is given, so that a directory can be moved.
        filename: the path that the operations in the graph use unless they are told another one.
        locks: a `LockManager` (default) or `RedisLocks`.

    Example::

        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tf.compat.v1.get_variable("weight", shape=(3, 2))
            session.run(tf.compat.v1.global_variables_initializer())
            saver = SafeSaver(max_to_keep=3)
            saver.save(session, "run/model", global_step=100)
            saver.restore(session, saver.latest("run"))
    """

    def __init__(
        self,
        var_list: Any = None,
        reshape: bool = False,
        sharded: bool = False,
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000.0,
        name: str | None = None,
        restore_sequentially: bool = False,
        saver_def: Any = None,
        builder: Any = None,
        defer_build: bool = False,
        allow_empty: bool = False,
        write_version: int = _V2,
        pad_step_number: bool = False,
        save_relative_paths: bool = False,
        filename: str | None = None,
        *,
        locks: Locks | None = None,
    ) -> None:
        version = write_version if saver_def is None else saver_def.version
        if version == _V1:
            raise ValueError(
                "Expected write_version to be tf.compat.v1.train.SaverDef.V2 (the default): files "
                f"of version 1 have no checksums. Received: write_version={version!r}"
            )
        super().__init__(
            var_list=var_list,
            reshape=reshape,
            sharded=sharded,
            max_to_keep=max_to_keep,
            keep_checkpoint_every_n_hours=keep_checkpoint_every_n_hours,
            name=name,
            restore_sequentially=restore_sequentially,
            saver_def=saver_def,
            builder=builder,
            defer_build=defer_build,
            allow_empty=allow_empty,
            write_version=write_version,
            pad_step_number=pad_step_number,
            # A directory of checkpoints can be moved, whatever is asked for.
            save_relative_paths=True,
            filename=filename,
        )
        if saver_def is not None:
            max_to_keep = saver_def.max_to_keep
            keep_checkpoint_every_n_hours = saver_def.keep_checkpoint_every_n_hours
        # 0 and None both mean all, in TensorFlow, and for ever.
        self._keeping = Keep(
            max_to_keep or None, keep_checkpoint_every_n_hours * 3600.0, for_ever=not max_to_keep
        )
        self._names: dict[str, set[str]] = {}
        #: As the user calls them.
        self._folders: dict[str, str] = {}
        self._pads = pad_step_number
        self._locks = chosen_locks(locks)
        self._turn = threading.RLock()
        self._last: tuple[BundleDirectory, Family] | None = None

    def save(
        self,
        sess: Any,
        save_path: str | os.PathLike[str],
        global_step: Any = None,
        latest_filename: str | None = None,
        meta_graph_suffix: str = "meta",
        write_meta_graph: bool = True,
        write_state: bool = True,
        strip_default_attrs: bool = False,
        save_debug_info: bool = False,
    ) -> str | None:
        """Save the variables of a session; the path that `restore` takes.

        A checkpoint of the same name is replaced, and stays until the new one is whole.

        Args:
            sess: the session.
            save_path: the path of the checkpoint, to which ``global_step`` is added.
            global_step: a number, or a tensor or the name of one.
            latest_filename: the name of the file ``checkpoint``.
            meta_graph_suffix: of the file with the graph.
            write_meta_graph: write that file.
            write_state: list it in the file ``checkpoint`` and delete what is too old.
            strip_default_attrs: leave out of the graph what has its default value.
            save_debug_info: write where in the program the graph was made.
        """
        state_name = latest_filename or DEFAULT_NAME
        if os.path.split(state_name)[0]:
            raise ValueError(
                "'latest_filename' must not contain path components. "
                f"Received: latest_filename={latest_filename!r}"
            )
        folder, base = os.path.split(os.fspath(save_path))
        name = base if global_step is None else f"{base}-{self._step(sess, global_step)}"
        if name == state_name:
            raise ValueError(
                f"'latest_filename' collides with 'save_path': {state_name!r} and {save_path!r}"
            )
        place = self._place(folder, state_name, meta_graph_suffix)
        path = os.path.join(folder, name)
        self._folders[str(place.path)] = folder
        with self._turn, self._staged(place, base, name) as staged:
            with file_errors(staged.prefix, path):
                written = super().save(
                    sess, staged.prefix, write_meta_graph=False, write_state=False
                )
                if written is None:
                    return None  # There are no variables: allow_empty.
                if write_meta_graph and not tf.executing_eagerly():
                    with sess.graph.as_default():
                        self.export_meta_graph(
                            f"{staged.prefix}.{meta_graph_suffix}",
                            strip_default_attrs=strip_default_attrs,
                            save_debug_info=save_debug_info,
                        )
            staged.publish(self._keeping if write_state else None)
        return path

    def _staged(self, place: BundleDirectory, base: str, name: str) -> StagedBundle:
        """What this saver has saved here under other names counts as well, as in TensorFlow."""
        own = self._names.setdefault(str(place.path), set())
        own.add(name)
        family = Family(base, bare=True, others=frozenset(own))
        self._last = place, family
        return stage(place, family, None, exactly=name)

    @staticmethod
    def from_proto(saver_def: Any, import_scope: str | None = None) -> SafeSaver:
        """A saver from a ``saver_def``, whose operations are under ``import_scope``."""
        return SafeSaver(saver_def=saver_def, name=import_scope)

    def restore(self, sess: Any, save_path: str | os.PathLike[str]) -> None:
        """Put the values of a checkpoint back, after verifying every byte of it.

        ``sess`` is the session, ``save_path`` what `save` or `latest` has returned. Nobody deletes
        or replaces it meanwhile.
        """
        if save_path is None:
            raise ValueError("Can't load save_path when it is None.")
        folder, name = os.path.split(os.fspath(save_path))
        place = self._place(folder)
        with reading(place):
            bundle = Bundle(place.path, name)
            if bundle.index.exists():  # Otherwise it is of version 1, or TensorFlow says it.
                bundle.verify()
            super().restore(sess, bundle.prefix)

    def latest(
        self, directory: str | os.PathLike[str], latest_filename: str | None = None
    ) -> str | None:
        """The newest checkpoint of ``directory`` whose parts are whole; None if there is none.

        As `tf.train.latest_checkpoint`, which believes the file ``checkpoint`` (or
        ``latest_filename``).
        """
        folder = os.fspath(directory)
        place = self._place(folder, latest_filename or DEFAULT_NAME)
        with reading(place):
            newest = next(place.whole(None), None)
        return None if newest is None else os.path.join(folder, newest.name)

    @property
    def last_checkpoints(self) -> list[str]:
        """What ``max_to_keep`` counts where this saver has saved last, from oldest to newest."""
        if self._last is None:
            return []
        place, family = self._last
        with reading(place):
            state, found = place.state(), list(place.whole(family))
        listed = {} if state is None else state.listed
        return [self._shown(b) for b in reversed(found) if b.name in listed]

    def _shown(self, bundle: Bundle) -> str:
        return os.path.join(self._folders[str(bundle.directory)], bundle.name)

    def _step(self, sess: Any, global_step: Any) -> str:
        is_of_graph = isinstance(global_step, (str, tf.Tensor, tf.Variable))
        if is_of_graph and not tf.executing_eagerly():
            global_step = sess.run(global_step)  # A text is the name of a tensor.
        number = whole_number(global_step)
        return f"{number:08d}" if self._pads else str(number)

    def _place(
        self, folder: str, state_name: str = DEFAULT_NAME, meta_suffix: str = "meta"
    ) -> BundleDirectory:
        return BundleDirectory(
            folder or ".", locks=self._locks, state_name=state_name, meta_suffix=meta_suffix
        )
