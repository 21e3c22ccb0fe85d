"""What the interpreter tries of Triton's kernels beside the catalogue, on a card: forced plans, caches, odd input."""

from interpreter.offsets_suite import (  # noqa: F401
    land,
    test_backward,
    test_batch_invariant,
    test_decode,
    test_decode_from_e4m3,
    test_derivatives,
    test_forward,
    test_statistics,
)
from interpreter.suite import (  # noqa: F401
    dirty,
    test_a_mod_without_arguments,
    test_dropout_bits,
    test_fold_into_other_keys,
    test_fused,
    test_keys_in_a_cache,
    test_lengths_are_clamped,
    test_odd_scales,
    test_rows_and_keys_of_no_sequence,
    test_tma,
)
