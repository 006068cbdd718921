// Rows of a prefill, packed or padded, for the tests of kernels that take a PrefillBatch.
#pragma once

#include "kernels/recurrent/prefill_batch.hpp"
#include "properties/support/gpu.hpp"

namespace lockstep::testing_support {

/// Rows over the slots of a pool: some have no slot, some no state to resume from. Packed rows have
/// kBehind tokens of padding after the last one; padded rows are all as long as the longest.
struct PrefillRows {
  static constexpr std::int64_t kBehind = 3;

  // NOLINTNEXTLINE(readability-identifier-naming): beside a member of that name
  PrefillRows(const Sizes& row_lengths, std::uint64_t seed, bool padded_)
      : lengths(row_lengths), padded(padded_) {
    const auto rows = static_cast<std::int64_t>(lengths.size());
    longest = std::max<std::int64_t>(1, *std::max_element(lengths.begin(), lengths.end()));
    starts = starts_of(lengths);
    counts = ints(lengths);
    tokens = padded ? rows * longest : sum(lengths) + kBehind;
    slots = 2 * rows + 1;
    indices = Array<std::int32_t, 1>(Shape<1>{rows}, -1);
    resumes = Array<bool, 1>(Shape<1>{rows}, true);
    for (std::int64_t n = 0; n < rows; ++n) {
      const auto draw = random_below(8, seed, 400, static_cast<std::uint64_t>(n));
      if (rows == 1 || draw != 0) indices(n) = static_cast<std::int32_t>(2 * (rows - 1 - n) + 1);
      resumes(n) = draw % 3 != 1;
    }
  }

  /// token(t) for the tokens that no row may look at, slot(i) for the slots that none resumes from.
  template <class Token, class Slot>
  void for_each_unread(bool with_state, Token token, Slot slot) const {
    for (std::int64_t n = 0; n < static_cast<std::int64_t>(lengths.size()); ++n) {
      const std::int64_t length = lengths[static_cast<std::size_t>(n)];
      const std::int64_t begin = padded ? n * longest : starts(n);
      const std::int64_t end = begin + (padded ? longest : length);
      const bool skipped = with_state && indices(n) < 0;
      for (std::int64_t t = skipped ? begin : begin + length; t < end; ++t) token(t);
      if (with_state && !skipped && !resumes(n)) slot(indices(n));
    }
    for (std::int64_t t = padded ? tokens : tokens - kBehind; t < tokens; ++t) token(t);
  }

  Sizes lengths;
  bool padded;
  std::int64_t tokens, slots, longest;
  Array<std::int32_t, 1> starts, indices, counts;
  Array<bool, 1> resumes;
};

/// The rows' index arrays on the device.
struct DevicePrefillRows {
  explicit DevicePrefillRows(const PrefillRows& rows)
      : padded_size(rows.padded ? rows.longest : 0),
        starts(rows.starts),
        indices(rows.indices),
        counts(rows.counts),
        resumes(rows.resumes.shape()) {
    resumes.set({rows.resumes.begin(), rows.resumes.end()});
  }

  kernels::PrefillBatch batch(bool with_state) const {
    kernels::PrefillBatch batch{.padded_size = padded_size};
    if (padded_size > 0)
      batch.context_lengths = counts.view();
    else
      batch.query_start_loc = starts.view();
    if (with_state) {
      batch.slots = {.indices = indices.view()};
      batch.has_initial_state =
          make_view(reinterpret_cast<const bool*>(resumes.data()), resumes.shape());
    }
    return batch;
  }

  std::int64_t padded_size;
  kernels::DeviceTensor<std::int32_t, 1> starts, indices, counts;
  kernels::DeviceTensor<unsigned char, 1> resumes;
};

}  // namespace lockstep::testing_support
