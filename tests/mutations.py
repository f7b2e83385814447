"""Lines on which guarantees rest, what they are replaced by, and the test that has to notice.

``python tests/mutations.py`` prints the table of `docs/reliability.md`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """``line`` occurs once in ``module`` (of keras_safe_ckpt); ``test`` is of the normal suite."""

    guarantee: str
    module: str
    line: str
    instead: str
    test: str


POWER = "tests/test_power_cut.py::test_a_save_that_returned_outlives_a_power_cut"
DATA = "tests/test_power_cut_data.py::test_what_was_flushed_outlives_a_power_cut"
HALF = "tests/test_half_replaced.py"
MOMENT = "tests/test_errors_of_the_moment.py"
HOSTILE = "tests/test_attackers.py::test_no_hostile_file_does_any_harm"

MUTATIONS = (
    # Durable when it returns.
    Mutation(
        "The name of a published file is on the disk when a save returns",
        "storage/atomic.py",
        "sync_directory(self.target.parent)",
        "pass",
        f"{POWER}[replaced-keras]",
    ),
    Mutation(
        "Its bytes are on the disk before it has its name",
        "storage/atomic.py",
        "_sync_to_device(self._descriptor)",
        "pass",
        f"{POWER}[first-weights_h5]",
    ),
    Mutation(
        "So is every directory that is made on the way",
        "storage/paths.py",
        "sync_directory(path.parent)",
        "pass",
        f"{POWER}[first-weights_h5]",
    ),
    Mutation(
        "What is set aside has its new name before it loses the old one",
        "storage/publishing.py",
        "            sync_directory(self._directory)\n",
        "",
        f"{POWER}[set aside-keras]",
    ),
    Mutation(
        "What is pruned does not come back",
        "storage/pruning.py",
        "sync_directory(self._catalog.directory)",
        "pass",
        "tests/test_details.py::test_pruning_is_durable",
    ),
    Mutation(
        "Of several files the last one is there only if all are",
        "storage/atomic.py",
        "sync_directory(last.target.parent)",
        "pass",
        "tests/test_atomic.py::test_group_is_committed_by_its_last_file",
    ),
    Mutation(
        "An appended group of records is on the disk when the append returns",
        "datasets/appending.py",
        "write_all(descriptor, data, offset)\n        os.fsync(descriptor)",
        "write_all(descriptor, data, offset)",
        f"{DATA}[appended]",
    ),
    Mutation(
        "Rows are on the disk before the journal says that they are",
        "storage/journaled_file.py",
        "os.fsync(self._descriptor)\n            # It holds parts of the file.",
        "# It holds parts of the file.",
        f"{DATA}[worker, flushed]",
    ),
    Mutation(
        "Rows behind some that a power cut took are not taken for the next ones",
        "datasets/spool.py",
        "if link != _LINK.pack(_LINK_MARK, self.size):",
        "if False:",
        "tests/test_central_h5.py::test_nothing_behind_a_gap_is_read",
    ),
    # Never torn, never worse.
    Mutation(
        "Bytes that were not synced are never published",
        "storage/atomic.py",
        "if not self._synced:",
        "if False:",
        "tests/test_atomic.py::test_unsynced_bytes_are_never_published",
    ),
    Mutation(
        "No two writers have one temporary file",
        "storage/atomic.py",
        " | os.O_EXCL",
        "",
        "tests/test_details.py::test_file_at_the_temp_path_is_not_taken_over",
    ),
    Mutation(
        "A temporary file whose writer lives is not swept",
        "storage/atomic.py",
        "return due and _claim_if_possible(descriptor)",
        "return due",
        "tests/test_atomic.py::test_old_temp_of_another_machine_that_is_locked_is_not_swept",
    ),
    Mutation(
        "What is in place is judged once more under the lock",
        "storage/publishing.py",
        "reason = self._reason_to_keep(target, veto, new)",
        "reason = None",
        "tests/test_store.py::test_slower_writer_does_not_replace_a_newer_checkpoint",
    ),
    Mutation(
        "And again if somebody has replaced it meanwhile without the lock",
        "storage/publishing.py",
        "if self._catalog.identity_of(target) == judged:",
        "if True:",
        "tests/test_store.py::test_what_somebody_put_in_place_without_the_lock_is_judged_as_well",
    ),
    Mutation(
        "Who has lost the lock does not commit",
        "storage/publishing.py",
        "            lock.ensure_held()\n            self._keep_aside(",
        "            self._keep_aside(",
        "tests/test_store.py::test_lost_lock_prevents_the_commit",
    ),
    Mutation(
        "Nor if it was lost while the former one was set aside",
        "storage/publishing.py",
        "if set_aside is not None:\n                lock.ensure_held()",
        "if set_aside is not None:\n                pass",
        "tests/test_store.py::test_lock_that_is_lost_while_the_former_is_set_aside_prevents_the_commit",
    ),
    Mutation(
        "What cannot be read back is not published",
        "storage/publishing.py",
        "read_back(self._format, staged, manifest)",
        "pass",
        "tests/test_store.py::test_what_cannot_be_read_back_is_not_published",
    ),
    Mutation(
        "What cannot be read at the moment is not replaced",
        "storage/publishing.py",
        "except (CheckpointNotFoundError, CorruptCheckpointError):\n            return None",
        "except (CheckpointNotFoundError, CorruptCheckpointError, UnreadableCheckpointError):\n"
        "            return None",
        "tests/test_store.py::test_incumbent_that_cannot_be_read_now_is_not_replaced",
    ),
    Mutation(
        "Nothing is pruned unless one that stays is whole",
        "storage/pruning.py",
        "if not doomed or not self._catalog.any_whole(sorted(kept), self._events.report_skip):",
        "if not doomed:",
        "tests/test_store.py::test_prune_deletes_nothing_unless_a_whole_one_stays",
    ),
    Mutation(
        "Every array is compared with its digest",
        "storage/formats/array_reader.py",
        "if digest.hexdigest() != record.digest:",
        "if False:",
        "tests/test_store.py::test_damaged_newest_is_passed_over_by_name_and_reason",
    ),
    Mutation(
        "So is everything between the arrays",
        "storage/formats/array_reader.py",
        "if structure.hexdigest() != self._manifest.structure:",
        "if False:",
        "tests/test_details.py::test_structure_that_was_changed",
    ),
    Mutation(
        "And the manifest with its own",
        "storage/manifest.py",
        "if digest != _digest(canonical):",
        "if False:",
        "tests/test_manifest.py::test_any_changed_value_is_noticed",
    ),
    Mutation(
        "A model that does not fit is left as it was",
        "storage/restore.py",
        "    if differences:\n        raise IncompatibleCheckpointError(path, differences)\n",
        "",
        "tests/test_load.py::test_other_width_is_named",
    ),
    Mutation(
        "The best of before a restart counts",
        "training/best.py",
        "            best.learn(value)\n",
        "            pass\n",
        "tests/test_model_checkpoint.py::test_best_survives_a_restart",
    ),
    Mutation(
        "A value is the best only when its file is durable",
        "callbacks/checkpoint_run.py",
        "self._best.learn(value if checkpoint is not None else veto.kept)",
        "pass",
        "tests/test_model_checkpoint.py::test_best_advances_only_when_its_file_is_durable",
    ),
    Mutation(
        "What is replaced under its own name is in a folder that a power cut does not take",
        "storage/bundles/recovery.py",
        "            sync_directory(folder.parent)",
        "            pass",
        "tests/test_power_cut_bundles.py::test_what_was_published_outlives_a_power_cut[replaced]",
    ),
    Mutation(
        "And is put back at once, whichever machine finds it",
        "storage/bundles/recovery.py",
        "lambda path: (path / JOURNAL_NAME).exists()",
        "lambda path: False",
        "tests/test_power_cut_bundles.py::test_what_was_published_outlives_a_power_cut[replaced]",
    ),
    # Attackers.
    Mutation(
        "A list of TensorFlow's that cannot be read for a moment is not taken for none",
        "storage/bundles/state_file.py",
        "        if error.errno in _NO_FILE:\n            return None\n        raise",
        "        return None",
        "tests/test_bundle_directory.py::test_a_list_that_cannot_be_read_now_is_not_forgotten",
    ),
    Mutation(
        "Nor the newest checkpoint for the oldest",
        "storage/bundles/directory.py",
        "except FileNotFoundError:\n            return 0.0",
        "except OSError:\n            return 0.0",
        "tests/test_bundle_directory.py::"
        "test_the_newest_is_not_taken_for_the_oldest_when_its_time_cannot_be_told",
    ),
    Mutation(
        "A folder that cannot be removed at first is tried again",
        "storage/atomic.py",
        "for _ in range(2):",
        "for _ in range(1):",
        "tests/test_atomic.py::test_scratch_directory_is_removed_although_a_call_fails_once",
    ),
    Mutation(
        "What Keras refuses is an error of the tree, and nothing of it is executed",
        "storage/restore.py",
        "raise IncompatibleCheckpointError(path, [_said(error)]) from error",
        "raise",
        HOSTILE,
    ),
    Mutation(
        "Texts of an attribute that are all one do not fill the memory",
        "datasets/inspection.py",
        "if count > 1 and count * longest > _MOST_TEXT_BYTES:",
        "if False:",
        HOSTILE,
    ),
    Mutation(
        "A repair takes time in proportion to its file",
        "datasets/verification.py",
        "if self._left < 0:",
        "if False:",
        HOSTILE,
    ),
    Mutation(
        "A compressed chunk unpacks to no more than it should",
        "datasets/packed_chunks.py",
        "if _unpacks_to_more(data, chunk_bytes + _SPARE_BYTES):",
        "if False:",
        HOSTILE,
    ),
    Mutation(
        "A manifest of millions of values takes no memory",
        "storage/manifest.py",
        'if sum(map(data.count, (b",", b"[", b"{"))) > _MOST_VALUES:',
        "if False:",
        HOSTILE,
    ),
    Mutation(
        "A hostile journal is an error of the tree",
        "storage/journaled_file.py",
        "if size > os.stat(path).st_size or pages // _PAGE_ENTRY > -(-size // _PAGE):",
        "if False:",
        HOSTILE,
    ),
    Mutation(
        "A former checkpoint is set aside although a link to it has the name",
        "storage/publishing.py",
        "os.path.samestat(os.lstat(target), os.lstat(aside))",
        "os.path.samefile(target, aside)",
        "tests/test_planted_links.py::test_a_former_one_is_kept_although_a_link_to_it_has_the_name",
    ),
    Mutation(
        "The folder of a worker is never a link",
        "training/backups.py",
        "refuse_linked_directory(folder)",
        "pass",
        "tests/test_planted_links.py::test_a_link_at_each_path_that_is_written[run]",
    ),
    Mutation(
        "What replaces a closed file is closed",
        "storage/atomic.py",
        "closed_as(self.target, *closed_like)",
        "0o666",
        "tests/test_modes.py::test_a_closed_checkpoint_stays_closed",
    ),
    Mutation(
        "So is the journal of a closed file",
        "storage/journaled_file.py",
        "closed_like=[self.path]",
        "closed_like=[]",
        "tests/test_modes.py::test_a_closed_data_file_stays_closed_on_its_way",
    ),
    # Long runs.
    Mutation(
        "A save leaves no descriptor open",
        "storage/atomic.py",
        "let_go(descriptor)  # Synced by now, or never to be published.",
        "pass",
        "tests/test_soak.py::test_saves_leave_nothing_behind",
    ),
    # Locks.
    Mutation(
        "A wait for a lock ends",
        "storage/locks.py",
        "if remaining <= 0:",
        "if False:",
        "tests/test_store.py::test_lock_timeout_leaves_everything_as_it_was",
    ),
    Mutation(
        "Whoever locked a file that was deleted meanwhile locks the new one",
        "storage/locks.py",
        "if is_at(path, status):",
        "if True:",
        "tests/test_file_locks.py::TestFileLocks::test_a_file_deleted_while_another_waits",
    ),
    Mutation(
        "A forked child does not hold the locks of its parent",
        "storage/lock_descriptors.py",
        "    for file in list(_files):\n        with contextlib.suppress(OSError):\n"
        "            file.close()\n",
        "",
        "tests/test_file_locks.py::TestFileLocks::"
        "test_a_fork_while_a_thread_waits_leaves_no_lock_in_the_child",
    ),
    Mutation(
        "A holder whose lock went to somebody else does not publish",
        "storage/redis_locks.py",
        "        if newest > self.token:\n",
        "        if False:\n",
        "tests/test_redis_locks.py::test_a_paused_holder_does_not_commit",
    ),
    Mutation(
        "One that noticed nothing is told at the end of the block",
        "storage/redis_locks.py",
        "if self.token and newest > self.token:",
        "if False:",
        "tests/test_redis_locks.py::test_a_newer_token_makes_the_holder_stale",
    ),
    # Interruptions.
    Mutation(
        "A save in the background is finished before the program ends",
        "storage/writer.py",
        "daemon=False",
        "daemon=True",
        "tests/test_writer.py::test_save_begun_by_a_daemon_is_there_when_the_program_has_ended",
    ),
    Mutation(
        "Its error is raised by the next call",
        "storage/writer.py",
        "            self._error = error\n            # Said",
        "            # Said",
        "tests/test_writer.py::test_error_is_raised_once",
    ),
    Mutation(
        "A torn append is undone",
        "datasets/appending.py",
        "        _cut(path, before.size)\n",
        "        pass\n",
        "tests/test_tfrecord_writing.py::test_an_append_that_was_torn_is_undone",
    ),
    # A run of several workers.
    Mutation(
        "A wait for workers that agree ends",
        "cluster/agreement.py",
        "posts, missing = self._cohort.collect(key, self._patience)",
        "posts, missing = self._cohort.collect(key, 80)",
        "tests/test_agreement.py::test_a_worker_that_does_not_answer_is_named",
    ),
    Mutation(
        "So does one at a barrier",
        "cluster/cohort.py",
        "values, missing = self.collect(key, seconds)",
        "values, missing = self.collect(key, 80)",
        "tests/test_cohort.py::test_who_does_not_come_is_named",
    ),
    Mutation(
        "All workers stop after the same step",
        "cluster/agreement.py",
        "max(posts.values()) + 1",
        "max(posts.values())",
        "tests/test_agreement.py::test_the_flag_of_a_running_step_is_never_overtaken",
    ),
    Mutation(
        "Whoever has a notice after a step does not begin the next one",
        "cluster/agreement.py",
        "self._reading.wait_for(lambda: self._has_read(number), _MARGIN_SECONDS)",
        "pass",
        "tests/test_agreement.py::test_whoever_asks_after_a_step_halts_there",
    ),
    Mutation(
        "What another has saved in place of the chief is not of all workers",
        "training/backups.py",
        "if worker == writer:",
        "if worker == 0:",
        "tests/test_backups.py::"
        "test_what_another_has_saved_in_place_of_the_chief_is_not_of_all_workers",
    ),
    Mutation(
        "A restarted run goes on from a checkpoint of all workers",
        "training/backups.py",
        "if not self.missing_parts(backup, workers):",
        "if True:",
        "tests/test_backups.py::test_a_checkpoint_of_all_workers_comes_before_a_newer_degraded_one",
    ),
    Mutation(
        "Before the first one of all workers a run that makes backups begins anew",
        "training/backups.py",
        "if incomplete and never_complete and not else_degraded:",
        "if False:",
        "tests/test_backups.py::"
        "test_a_run_with_backups_begins_anew_before_the_first_one_of_all_workers",
    ),
    Mutation(
        "But not if the part of one was lost later",
        "training/backups.py",
        'not skipped and all(b.document.get("degraded") for b in incomplete)',
        "not skipped",
        "tests/test_backups.py::"
        "test_a_run_with_backups_begins_anew_before_the_first_one_of_all_workers",
    ),
    Mutation(
        "Degraded checkpoints do not displace one of all workers",
        "training/backups.py",
        "KeepAny((KeepNewest(self._keep), _KeepNewestOfAll()))",
        "KeepNewest(self._keep)",
        "tests/test_backups.py::test_the_newest_of_all_workers_outlives_any_number_of_degraded_ones",
    ),
    Mutation(
        "Nor do they replace one of the same step",
        "training/backups.py",
        '("-degraded" if document.get("degraded") else "")',
        '""',
        "tests/test_backups.py::test_a_degraded_checkpoint_of_the_same_step_replaces_nothing",
    ),
    Mutation(
        "A worker's part stays as long as its checkpoint",
        "training/backups.py",
        "KeepAny((KeepNewest(self._keep + 1), _KeepSaves(saves)))",
        "KeepNewest(self._keep + 1)",
        "tests/test_backups.py::test_parts_whose_chief_was_killed_displace_none_that_is_needed",
    ),
    Mutation(
        "A part replaces none of another save",
        "training/backups.py",
        "name += f\"-{document['save']}\"",
        "pass",
        "tests/test_backups.py::test_a_part_of_the_same_step_replaces_none_that_is_needed",
    ),
    # Nothing is taken from where it is the only one.
    Mutation(
        "What is being replaced under its own name is swept by nobody",
        "storage/atomic.py",
        "elif _has_journal(path):",
        "elif False:",
        f"{HALF}::test_another_writer_in_the_directory_does_not_sweep_what_was_replaced",
    ),
    Mutation(
        "Nor is it gone with the program that could not put it right",
        "storage/atomic.py",
        "            is_over = False\n",
        "",
        f"{HALF}::test_what_could_not_be_put_right_outlives_its_process[recovery.double = fail]",
    ),
    Mutation(
        "However that was interrupted",
        "storage/bundles/staging.py",
        "if self._is_half_way:  #",
        "if False:  #",
        f"{HALF}::test_an_interruption_while_it_is_put_right_keeps_what_was_replaced",
    ),
    Mutation(
        "Rows that cannot be read now do not make way for fewer",
        "datasets/growing_file.py",
        "cause.errno in NOT_ITS_FAULT",
        "False",
        f"{MOMENT}::test_what_cannot_be_read_now_is_not_replaced_by_fewer_rows",
    ),
    Mutation(
        "A disk that stumbles while Keras loads is no misfit",
        "storage/restore.py",
        "if isinstance(error, OSError) and error.errno in NOT_ITS_FAULT:",
        "if False:",
        f"{MOMENT}::test_a_disk_that_stumbles_while_keras_loads_is_no_misfit",
    ),
    Mutation(
        "What is no file is named, and a run does not begin anew in silence",
        "storage/catalog.py",
        "if reason := why_passed_over(path):",
        "if reason := '':",
        "tests/test_not_a_file.py::test_a_run_does_not_begin_anew_in_silence",
    ),
    Mutation(
        "What was published anew meanwhile is not pruned",
        "storage/pruning.py",
        "if not self._catalog.is_as_known(path):",
        "if False:",
        "tests/test_details.py::test_what_was_published_anew_meanwhile_is_not_pruned",
    ),
    Mutation(
        "The changed pages of a data file are on the disk before it has its name",
        "storage/journaled_file.py",
        "            os.fsync(self._descriptor)\n            os.replace(self.path, target)",
        "            os.replace(self.path, target)",
        "tests/test_journaled_file.py::"
        "test_the_changed_pages_are_on_the_disk_before_the_file_has_its_name",
    ),
    Mutation(
        "Whoever has lost the lock does not append",
        "datasets/appending.py",
        "        held.ensure_held()\n        try:\n            group.in_doubt = longer",
        "        try:\n            group.in_doubt = longer",
        "tests/test_tfrecord_writing.py::test_whoever_has_lost_the_lock_does_not_append",
    ),
    Mutation(
        "A wait for the log of requests ends",
        "cluster/agreement.py",
        "self._log_read.wait(self._patience + _MARGIN_SECONDS)",
        "self._log_read.wait()",
        "tests/test_agreement.py::"
        "test_a_log_of_requests_that_does_not_end_is_not_waited_for_for_ever",
    ),
    Mutation(
        "Whoever has lost the lock replaces no checkpoint of TensorFlow",
        "storage/bundles/staging.py",
        "            lock.ensure_held()\n            if there:",
        "            if there:",
        "tests/test_bundle_directory.py::"
        "test_whoever_has_lost_a_lock_replaces_nothing[keras_safe_ckpt]",
    ),
    Mutation(
        "Nor whoever has lost the one that keeps readers away",
        "storage/bundles/staging.py",
        "                readers.ensure_held()\n            journal = Journal(",
        "            journal = Journal(",
        "tests/test_bundle_directory.py::"
        "test_whoever_has_lost_a_lock_replaces_nothing[keras_safe_ckpt-readers]",
    ),
    Mutation(
        "Who is to delete old ones looks for that lock as well",
        "storage/bundles/staging.py",
        "                readers.ensure_held()\n                for name in names:",
        "                for name in names:",
        "tests/test_bundle_directory.py::"
        "test_whoever_has_lost_the_lock_of_the_readers_deletes_nothing",
    ),
    Mutation(
        "No power cut leaves a former index with the data of the next one",
        "storage/bundles/staging.py",
        "sync_directory(path)  # No index",
        "pass  # No index",
        "tests/test_bundle_directory.py::test_an_index_is_gone_for_good_before_its_data_goes",
    ),
    Mutation(
        "Nor does one while the former one is put back",
        "storage/bundles/files.py",
        "            sync_directory(target)\n        try:",
        "            pass\n        try:",
        "tests/test_bundle_directory.py::test_the_former_data_is_back_for_good_before_its_index_is",
    ),
    Mutation(
        "What is replaced is on the disk, also where it has to be copied",
        "storage/bundles/files.py",
        "            sync_file(other)",
        "            pass",
        "tests/test_bundle_directory.py::test_what_is_copied_for_want_of_links_is_on_the_disk",
    ),
    Mutation(
        "Whoever has lost the lock does not undo an append of its own",
        "datasets/appending.py",
        "                held.ensure_held()\n                _cut(",
        "                _cut(",
        "tests/test_tfrecord_writing.py::test_whoever_has_lost_the_lock_does_not_undo_its_append",
    ),
    Mutation(
        "Nor that of a killed writer",
        "datasets/appending.py",
        "        held.ensure_held()\n        _cut(",
        "        _cut(",
        "tests/test_tfrecord_writing.py::test_whoever_has_lost_the_lock_does_not_put_right",
    ),
    Mutation(
        "What was cut off does not come back with a power cut",
        "datasets/appending.py",
        "        os.ftruncate(descriptor, size)\n        os.fsync(descriptor)",
        "        os.ftruncate(descriptor, size)",
        "tests/test_tfrecord_writing.py::"
        "test_what_is_cut_off_is_gone_for_good_before_the_note_says_so",
    ),
    Mutation(
        "No row of a feeder is skipped at the end of a segment",
        "datasets/spool.py",
        "            message = self._read_frame()\n"
        "            if message is not None:\n"
        "                return message\n"
        "            self._close()",
        "            self._close()",
        "tests/test_central_h5.py::test_what_was_appended_between_two_looks_is_not_skipped",
    ),
    Mutation(
        "Rows of an earlier life are set aside before their journal goes",
        "datasets/growing_file.py",
        "sync_directory(aside.parent)",
        "pass",
        "tests/test_data_files_durability.py::"
        "test_rows_of_an_earlier_life_have_their_new_name_before_their_journal_goes",
    ),
    Mutation(
        "No power cut brings back half of the streams that are in the file",
        "datasets/feed_folder.py",
        "sync_directory(self.path.parent)",
        "pass",
        "tests/test_data_files_durability.py::"
        "test_the_streams_have_left_for_good_before_any_of_them_goes",
    ),
)


def table() -> str:
    """Each guarantee, with the file of its line and the test that fails without it."""
    rows = [
        f"| {mutation.guarantee} | `{mutation.module}` | `{mutation.test}` |"
        for mutation in MUTATIONS
    ]
    return "\n".join(
        ["| what is guaranteed | where | the test that fails without it |", "|---|---|---|", *rows]
    )


if __name__ == "__main__":
    print(table())
