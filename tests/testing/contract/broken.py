"""The broken backends, each with the contract's tests that must fail for it and their message."""

from __future__ import annotations

from tests.testing.contract import broken_bytes as b
from tests.testing.contract import broken_calls as c
from tests.testing.contract import broken_order as o
from tests.testing.contract import broken_short_ways as short
from tests.testing.contract.broken_lending import BROKEN_LENDING
from tests.testing.contract.broken_media import BROKEN_MEDIA
from tests.testing.contract.broken_names import BROKEN_NAMES
from tests.testing.contract.broken_short_ways import BROKEN_SHORT_WAYS
from tests.testing.contract.defects import backend as _backend
from tests.testing.contract.defects import options as _options

BROKEN = [
    _backend(
        b.ForgetsWhatIsBeyond64KiB,
        r"C1: an object of 65537 bytes: byte 65536 of 65537 is 0x00 in place of 0x\w\w",
        "c01_a_load_returns_the_bytes_that_were_stored",
    ),
    _backend(
        b.NamesObjectsByANumber,
        r"C1: abababababab…/full-u256/\w+, which was stored with keys like it,: byte 0 of 64 is 0x\w\w in place of",
        "c01_keys_that_look_alike_name_objects_of_their_own",
    ),
    _backend(
        b.LoadsFromOnePosition,
        r"C1: one of 16 objects that were stored and loaded at once: byte 0 of 4096 is 0x\w\w in place of 0x\w\w",
        "c01_objects_that_are_stored_and_loaded_at_once_are_not_mixed",
    ),
    _backend(
        b.AnswersHitsFirst,
        r"C2: load_into returned \[HIT, HIT, MISS, MISS\]; it should return \[MISS, HIT, MISS, HIT\]",
        "c02_results_are_parallel_to_the_request",
    ),
    _backend(
        b.CannotTakeAnEmptyBatch,
        r"C2: the backend raised ValueError: max\(\) .* empty",
        "c02_an_empty_batch_has_an_empty_result",
    ),
    _backend(
        b.AnswersEachKeyOnce,
        r"C2: load_into returned \[HIT\]; it should return \[HIT, HIT, HIT\]",
        "c02_a_repeated_key_is_answered_every_time",
    ),
    _backend(
        b.ClearsTheBufferFirst,
        r"C3: a miss changed byte 0 of its buffer from 0xa5 to 0x00",
        "c03_a_miss_leaves_its_buffer_untouched",
    ),
    _backend(
        b.TakesASecondStoreForARemoval,
        r"C4: after .* load answered MISS",
        "c04_storing_again_is_harmless",
        "c04_storing_the_same_twice_at_once_is_harmless",
    ),
    _backend(
        b.RefusesASecondWriter,
        r"C4: the backend raised FileExistsError: .* somebody is storing it",
        "c04_storing_the_same_twice_at_once_is_harmless",
    ),
    _backend(
        b.ShowsObjectsWhenTheReservationEnds,
        r"C5: contains \(right after store returned, .*\) returned \[False\]; it should return \[True\]",
        "c05_what_is_stored_is_visible_at_once",
    ),
    _backend(
        b.ForgetsAllWhenClosed,
        r"C5: contains \(after closing and opening the medium\) returned \[False\]",
        "c05_what_is_stored_is_there_after_reopening",
    ),
    _backend(
        b.ReadsTheIndexAtOpenOnly,
        r"C5: contains \(from a second client\) returned \[False\]",
        "c05_what_is_stored_is_visible_to_a_second_client",
    ),
    _backend(
        b.WritesInPlace,
        r"C6: while (131072|6291457) equal bytes were stored .*, a load answered HIT with \d+ bytes '.*', \d+ ",
        "c06_readers_see_whole_objects_while_others_write",
        "c06_readers_see_large_objects_whole_while_others_write",
    ),
    _backend(
        b.WritesSmallObjectsInTwoSteps,
        r"C6: loading an object (before thread call 2 of its store|after its store failed at thread call 2) "
        r"answered CORRUPT",
        "c06_between_the_steps_of_a_store_others_see_all_or_nothing",
        "c06_a_store_that_fails_or_is_cancelled_leaves_all_or_nothing",
    ),
    _backend(
        b.KeepsWhatCameBeforeAnError,
        r"C6: loading an object after its store failed at thread call 1 answered CORRUPT",
        "c06_a_store_that_fails_or_is_cancelled_leaves_all_or_nothing",
    ),
    _backend(
        c.LoadsAgainBehindTheAnswer,
        r"C7: after it returned, the load wrote to buffer 0 of 3 after it had ended: byte 0 went from 0xee to 0x",
        "c07_a_load_that_returned_does_not_touch_its_buffer_afterwards",
    ),
    _backend(
        c.LoadsEachKeyByItself,
        r"C7: (after its thread call 2 failed while call 1 ran|cancelled while all its thread calls ran, .*), "
        r"the load wrote to buffer \d of 3",
        "c07_a_load_that_failed_does_not_touch_its_buffer_afterwards",
        "c07_a_cancelled_load_does_not_touch_its_buffer_afterwards",
    ),
    _backend(
        c.LeavesLoadsToThemselves,
        r"C7: cancelled 1 times while its thread call 1 ran, the load wrote to buffer 0 of 3",
        "c07_a_cancelled_load_does_not_touch_its_buffer_afterwards",
    ),
    _backend(
        c.StoresAgainBehindTheAnswer,
        r"C7: after it returned, the store read buffer 0 of 3 after it had ended: \d+ of 5000 stored bytes .* \(0xee\)",
        "c07_a_store_that_returned_does_not_read_its_buffer_afterwards",
    ),
    _backend(
        c.StoresEachKeyByItself,
        r"C7: (after its thread call 2 failed while call 1 ran|cancelled while all its thread calls ran, .*), "
        r"the store read buffer \d of 3",
        "c07_a_store_that_failed_does_not_read_its_buffer_afterwards",
        "c07_a_cancelled_store_does_not_read_its_buffer_afterwards",
    ),
    _backend(
        c.LeavesStoresToThemselves,
        r"C7: cancelled 1 times while its thread call 1 ran, the store read buffer 0 of 3",
        "c07_a_cancelled_store_does_not_read_its_buffer_afterwards",
    ),
    _backend(
        c.OpensAFileOnTheLoop,
        r"C8: load_into called open\('/dev/null'\) at .*:\d+ on the event loop's thread",
        "c08_nothing_that_blocks_is_called_on_the_event_loop",
    ),
    _backend(
        c.LooksAtEveryByteOnTheLoop,
        r"C8: load_into of \d+ bytes "
        r"(took \d+\.\d+ s, and the event loop stood still for \d+\.\d+ s|computed for [1-9]\d\d)",
        "c08_the_event_loop_turns_while_a_large_object_is_stored_and_loaded",
        "c08_nothing_is_computed_on_the_event_loop",
    ),
    _backend(
        c.HashesOnTheLoop,
        r"C8: store of 16777216 bytes computed for \d+\.\d ms on the event loop's thread without a pause",
        "c08_nothing_is_computed_on_the_event_loop",
    ),
    _backend(
        c.AsksTheFileSystemOnTheLoop,
        r"C8: store called os\.statvfs\('/'\) at .*:\d+ on the event loop's thread",
        "c08_nothing_that_blocks_is_called_on_the_event_loop",
    ),
    _backend(
        o.AsksTheFileSystemInATouch,
        r"C8: touch called os\.statvfs\('/'\) at .*:\d+ on the event loop's thread",
        "c08_nothing_that_blocks_is_called_on_the_event_loop",
    ),
    _backend(
        short.AsksTheFileSystemInOneCall,
        r"C8: load_and_check called os\.statvfs\('/'\) at .*:\d+ on the event loop's thread",
        "c08_nothing_that_blocks_is_called_on_the_event_loop",
    ),
    _backend(
        short.AsksTheFileSystemBeforeASeal,
        r"C8: store_and_seal called os\.statvfs\('/'\) at .*:\d+ on the event loop's thread",
        "c08_nothing_that_blocks_is_called_on_the_event_loop",
    ),
    _backend(
        c.WaitsForAnEventOnTheLoop,
        r"C8: load_into called Condition\.wait\(.*\) at .*broken_calls\.py:\d+ on the event loop's thread",
        "c08_nothing_that_blocks_is_called_on_the_event_loop",
    ),
    _backend(
        c.TalksToAServerOnTheLoop,
        r"C8: contains called socket\.sendall\(<socket.*>\) at .*:\d+, socket\.recv\(<socket",
        "c08_nothing_that_blocks_is_called_on_the_event_loop",
    ),
    _backend(
        c.WaitsForALockOnTheLoop,
        r"C8: store of \d+ bytes took \d+\.\d+ s, and the event loop stood still for \d+\.\d+ s",
        "c08_the_event_loop_turns_while_a_large_object_is_stored_and_loaded",
    ),
    _backend(
        c.EvictsWhatIsPinned,
        r"C9: a pinned object of 65536 bytes was gone \(MISS\) .* under a limit of 1048576",
        "c09_what_is_pinned_survives_eviction",
        "c09_what_is_pinned_twice_survives_until_both_are_released",
    ),
    _backend(
        c.UnpinsForEverybody,
        r"C9: a pinned object of 65536 bytes was gone \(MISS\) while the first of two reservations held it",
        "c09_what_is_pinned_twice_survives_until_both_are_released",
    ),
    _backend(
        c.CannotReleaseAfterAnError,
        r"C10: releasing a store that failed raised RuntimeError: the transaction has ended already",
        "c10_releasing_works_after_success_failure_and_cancellation",
    ),
    _backend(
        c.GivesBackWhatWasStoredOnly,
        r"C10: 32 reservations .* was never begun, .* 0 objects fit where 16 fitted before",
        "c10_reservations_that_were_not_used_give_their_room_back",
    ),
    _backend(
        c.CountsFailedStores,
        r"C10: 32 reservations .* failed, .* 0 objects fit where 16 fitted before",
        "c10_stores_that_failed_give_their_room_back",
    ),
    _backend(
        c.CountsCancelledStores,
        r"C10: 32 reservations .* was cancelled, .* 0 objects fit where 16 fitted before",
        "c10_stores_that_were_cancelled_give_their_room_back",
    ),
    _backend(
        c.CountsDeletedObjects,
        r"C10: 32 reservations .* 0 objects fit where 1[56] fitted before",
        "c10_stores_that_were_cancelled_give_their_room_back",
        "c10_stored_objects_give_their_room_back_when_deleted",
    ),
    _backend(
        c.NeverUnpins,
        r"C10: (16 objects were pinned and released 4 times in each way to load them, |prepare_load of 16 objects )",
        "c10_what_was_pinned_makes_room_after_its_release",
        "c10_a_preparation_that_fails_keeps_nothing",
    ),
    _backend(
        c.CountsStoredBytesOnly,
        r"C11: (32|two clients .* 64) reservations of 65536 bytes (were granted )?at once under a limit of 1048576",
        "c11_reservations_together_never_exceed_the_limit",
        "c11_clients_keep_one_limit_together",
    ),
    _backend(
        c.CountsABatchAtItsEnd,
        r"C11: one batch was granted 32 objects of 65536 bytes under a limit of 1048576",
        "c11_one_batch_is_never_granted_more_than_the_limit",
    ),
    _backend(
        c.GivesGrantedRoomAway,
        r"C11: capacity for 16 objects was granted, but storing number 1 was REJECTED",
        "c11_what_was_granted_can_be_stored",
    ),
    _backend(
        b.FindsNothingToDelete,
        r"C12: the backend raised FileNotFoundError: .* no object abababababab…/full-u256/",
        "c12_deleting_what_is_not_there_is_no_error",
        "c12_a_delete_leaves_keys_that_begin_alike",
    ),
    _backend(
        b.DeletesNothing,
        r"C12: (contains, after a delete of the first, returned \[True, True\]|of 1100 .* 1100 are still present)",
        "c12_what_was_deleted_is_gone_and_the_rest_is_not",
        "c12_a_large_batch_is_deleted_to_its_end",
    ),
    _backend(
        c.LoadsOnThreadsThatCloseDoesNotKnow,
        r"C13: close returned before a load held in a thread had ended",
        "c13_close_waits_for_a_running_load",
    ),
    _backend(
        c.StoresOnThreadsThatCloseDoesNotKnow,
        r"C13: close returned before a store held in a thread had ended",
        "c13_close_waits_for_a_running_store",
    ),
    _backend(
        c.DeletesOnThreadsThatCloseDoesNotKnow,
        r"C13: close returned before a delete held in a thread had ended",
        "c13_close_waits_for_lookups_deletes_and_listings",
    ),
    _backend(
        c.LooksUpOnThreadsThatCloseDoesNotKnow,
        r"C13: close returned before a lookup held in a thread had ended",
        "c13_close_waits_for_lookups_deletes_and_listings",
    ),
    _backend(
        c.ListsOnThreadsThatCloseDoesNotKnow,
        r"C13: close returned before a listing held in a thread had ended",
        "c13_close_waits_for_lookups_deletes_and_listings",
    ),
    _backend(
        c.LeavesATaskBehind,
        r"C13: close returned, and 1 s later tasks of the client still run: <.*LeavesATaskBehind.renew_leases",
        "c13_closing_again_is_harmless",
    ),
    _backend(
        c.CancelsWhatRunsAtClose,
        r"C13: close cut off a load held in a thread: it raised CancelledError",
        "c13_close_lets_running_operations_end_as_usual",
    ),
    _backend(
        c.FailsWhatRunsAtClose,
        r"C13: close cut off a store held in a thread: it raised OSError: .*the tier is closed",
        "c13_close_lets_running_operations_end_as_usual",
    ),
    _backend(c.ClosesOnce, r"C13: the backend raised ValueError: closed already", "c13_closing_again_is_harmless"),
    _backend(
        c.ClosesWhatItNeverOpened,
        r"C13: the backend raised AttributeError: .*medium",
        "c13_closing_what_was_never_opened_is_harmless",
    ),
    _backend(
        c.OpensInTheConstructor,
        r"C14: construction called open\('/dev/null'\) at .*:\d+",
        "c14_construction_opens_nothing_and_starts_no_thread",
    ),
    _backend(
        c.StartsAThreadInTheConstructor,
        r"C14: construction started the threads \['reaper'\]",
        "c14_construction_opens_nothing_and_starts_no_thread",
    ),
    _backend(
        c.NeedsALoopInTheConstructor,
        r"C14: construction outside of a running event loop raised RuntimeError: no running event loop",
        "c14_construction_needs_no_event_loop",
    ),
    _options(c.LaxOptions, r"C15: LaxOptions took the key no_such_option = 1", "c15_an_unknown_key_is_refused"),
    _options(
        c.BareOptions, r"C15: options without a description: BareOptions.retries;", "c15_every_option_is_described"
    ),
    _options(
        c.TalkativeOptions,
        r"C15: options that hold secrets and would be printed: TalkativeOptions.access_key;",
        "c15_secrets_are_hidden",
    ),
    _options(c.OddOptions, r"C15: OddOptions has no JSON schema: .*Clock", "c15_options_have_a_json_schema"),
    _backend(
        b.FillsASmallerBuffer,
        r"C16: loading an object of 1000 bytes into a buffer of 0 answered HIT, not CORRUPT",
        "c16_an_object_of_another_size_is_corrupt",
    ),
    _backend(
        b.BelievesItsIndex,
        r"C16: loading an object that was cut short answered HIT, not CORRUPT",
        "c16_a_damaged_object_is_corrupt",
    ),
    _backend(
        b.WritesWholeSectors,
        r"C17: loads of 1 bytes at offsets .* changed byte 1022 beside them from 0xa5 to 0x00",
        "c17_a_load_writes_nothing_beside_its_buffer",
    ),
    _backend(
        b.NeedsAlignedBuffers,
        r"C17: the backend raised OSError: .* the buffer's address ends in [1-7]",
        "c17_a_buffer_may_start_at_any_offset",
    ),
    _backend(
        b.NeedsWritableBuffers,
        r"C17: the backend raised TypeError: underlying buffer is not writable",
        "c17_a_store_takes_a_read_only_buffer",
    ),
    _backend(
        b.ListsTwice,
        r"C18: (list_objects listed abababababab…/full-u256/\w+ 2 times|of 1100 .* lists 1100 more than once)",
        "c18_a_listing_names_what_is_there_once_with_its_size",
        "c18_a_listing_goes_to_its_end",
    ),
    _backend(
        b.ListsTheSizeOnDisk,
        r"C18: list_objects gave abababababab…/full-u256/\w+ 4096 bytes; it has \d+",
        "c18_a_listing_names_what_is_there_once_with_its_size",
    ),
    _backend(
        b.ListsMilliseconds,
        r"C18: list_objects says that an object was stored at 1\d{12}\.\d+; it is 1\d{9} seconds since the epoch",
        "c18_a_listing_says_when_objects_were_stored",
    ),
    _backend(
        b.GoesOnWhereAListingWasLeft,
        r"C18: after a listing that was left, list_objects lists 1 of 3 objects",
        "c18_a_listing_may_be_left_at_any_batch",
    ),
    _backend(
        b.ListsFromACache,
        r"C18: after an earlier listing, a delete and a store, list_objects lists abababababab…/full-u256/\w+; "
        r"contains says False",
        "c18_a_listing_follows_stores_and_deletes",
    ),
    _backend(
        b.ListsNothingInPlaceOfAnError,
        r"C18: capability lists is not declared, but list_objects yielded \[\]",
        "c18_a_backend_that_cannot_list_says_so",
    ),
    _backend(
        b.TellsTheSizeOnDisk,
        r"C19: prepare_load says that abababababab…/full-u256/\w+ has \d+ bytes; it should say \d+",
        "c19_prepare_load_tells_the_size_of_what_is_there",
    ),
    _backend(
        b.RemembersSizes,
        r"C19: prepare_load says \(1000,\) bytes of an object that was deleted and stored with 700",
        "c19_an_object_that_was_replaced_has_its_new_size",
    ),
    _backend(
        b.KnowsNoSizes,
        r"C19: prepare_load says (that .* has None bytes; it should say \d+|\(None,\) bytes of an object)",
        "c19_prepare_load_tells_the_size_of_what_is_there",
        "c19_an_object_that_was_replaced_has_its_new_size",
    ),
    _backend(
        o.EvictsForSpareObjects,
        r"C20: spare objects were stored one by one, and \d+ of \d+ stored objects are gone",
        "c20_a_spare_object_evicts_nothing",
    ),
    _backend(
        o.EvictsSpareObjectsForSpareObjects,
        r"C20: spare objects were stored one by one, and \d+ of \d+ stored objects are gone",
        "c20_a_spare_object_evicts_nothing",
    ),
    _backend(
        o.RejectsSpareObjects,
        r"C20: 4 objects of 65536 bytes are stored under a limit of 1048576; of 32 spare ones only 0 were stored",
        "c20_a_spare_object_evicts_nothing",
        "c20_spare_objects_are_evicted_before_all_kept_ones",
        "c20_a_spare_object_that_was_loaded_is_kept",
    ),
    _backend(
        o.StoresSpareObjectsAsKeptOnes,
        r"C20: the order of eviction should be: spare objects, older kept ones.* objects, \[1[012], 3.*\] are left",
        "c20_spare_objects_are_evicted_before_all_kept_ones",
        "c20_a_spare_object_that_was_loaded_is_kept",
    ),
    _backend(
        o.LeavesLoadedObjectsSpare,
        r"C20: the order of eviction should be: spare objects, .* \[10, 4, 2\] objects, \[0, 4, [01]\] are left",
        "c20_a_spare_object_that_was_loaded_is_kept",
    ),
    _backend(
        o.IgnoresTouches,
        r"C21: the order of eviction should be: objects .* are left",
        "c21_touches_set_the_order_of_eviction",
        "c21_a_touch_says_whether_an_object_is_spare",
    ),
    _backend(
        o.TouchesTheLastKeyFirst,
        r"C21: the order of eviction should be: objects .* are left",
        "c21_touches_set_the_order_of_eviction",
        "c21_a_touch_says_whether_an_object_is_spare",
    ),
    _backend(
        o.TouchesAPageOnly,
        r"C21: the order of eviction should be: objects in the order of their touches.* are left",
        "c21_touches_set_the_order_of_eviction",
    ),
    _backend(
        o.TakesEveryTouchForAUse,
        r"C21: the order of eviction should be: objects that a touch made spare, .* are left",
        "c21_a_touch_says_whether_an_object_is_spare",
    ),
    _backend(
        o.NeverKeepsWhatWasSpare,
        r"C21: the order of eviction should be: objects that a touch made spare, .* are left",
        "c21_a_touch_says_whether_an_object_is_spare",
    ),
    _backend(
        o.TouchesPresentObjectsOnly,
        r"C21: the backend raised KeyError: ",
        "c21_a_touch_neither_makes_nor_loses_an_object",
    ),
    _backend(
        o.MakesWhatItTouches,
        r"C21: absent, 4 stored and absent objects were touched with spare=True; contains says \[True, ",
        "c21_a_touch_neither_makes_nor_loses_an_object",
    ),
    _backend(
        o.ClearsWhatItTouches,
        r"C21: a touched object: byte 0 of 1000 is 0x00 in place of",
        "c21_a_touch_neither_makes_nor_loses_an_object",
    ),
    _backend(
        short.MissesWhatDoesNotFit,
        r"C22: load_and_check returned \[HIT, MISS, HIT, HIT, MISS, MISS, HIT\]; it should return \[HIT, MISS, HIT",
        "c22_a_load_in_one_call_answers_as_its_steps_do",
    ),
    _backend(
        short.ClearsBuffersInOneCall,
        r"C22: a buffer of 50 bytes after MISS in one call, as by the steps,: byte 0 of 50 is 0x00 in place of 0xa5",
        "c22_a_load_in_one_call_answers_as_its_steps_do",
    ),
    _backend(
        short.TellsBeforeItReads,
        r"C22: an object of 1 bytes, when its check was told,: byte 0 of 1 is 0xa5 in place of 0x\w\w",
        "c22_checks_are_told_of_final_bytes_in_order",
    ),
    _backend(
        short.TellsOfWholeParts,
        r"C22: the check of an object of 1 bytes got filled\(1000\) with 1 of 1 bytes left",
        "c22_checks_are_told_of_final_bytes_in_order",
    ),
    _backend(
        short.HashesOtherMemory,
        r"C22: the check of an object of 1 bytes got the digest 0{32}, which is not that of its buffer",
        "c22_checks_are_told_of_final_bytes_in_order",
    ),
    _backend(
        short.HashesTheWholeBuffer,
        r"C22: the check of an object of \d+ bytes got the digest \w{32}, which is not that .* from byte [1-9]",
        "c22_checks_are_told_of_final_bytes_in_order",
    ),
    _backend(
        short.HashesAfterParts,
        r"C22: the check of an object of 1 bytes got hashed\(\) after filled\(\) of 1 bytes",
        "c22_checks_are_told_of_final_bytes_in_order",
    ),
    _backend(
        short.LeavesItsThreadInOneCall,
        r"C22: cancelled 1 times while its thread call 1 ran, the load wrote to buffer 0 of 3 after it",
        "c22_a_load_in_one_call_does_not_touch_its_buffer_afterwards",
    ),
    _backend(
        short.RejectsTheLastOneThatItSeals,
        r"C26: store_and_seal returned \[STORED, .*REJECTED\]; it should return \[STORED, .*STORED\]",
        "c26_a_store_that_seals_answers_as_a_store_does",
    ),
    _backend(
        short.StoresTheBeginningFirst,
        r"C26: an object stored by a store that seals: byte 0 of 1 is 0x\w\w in place of 0x\w\w",
        "c26_an_object_is_stored_as_it_is_after_its_seal",
    ),
    _backend(
        short.SealsAfterItHasAnswered,
        r"C26: cancelled 1 times while its thread call 1 ran, the store wrote to buffer 0 of 3 after it",
        "c26_a_store_that_seals_does_not_touch_its_buffer_afterwards",
    ),
    *BROKEN_NAMES,
    *BROKEN_SHORT_WAYS,
    *BROKEN_LENDING,
    *BROKEN_MEDIA,
]
