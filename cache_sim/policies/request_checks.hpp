// Checks of bad input that are the same for every cache, made before the cache's own rules. Oracles
// have their own.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/base/result.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// The error for an operation whose request is not admitted.
tl::unexpected<Error> no_such_request(const Operation& operation);

/// Whether the operation ends the request and stores nothing.
bool discards(const Operation& operation);

/// An admission has at least one token, its prompt is no longer than its tokens, and its name is
/// new.
Result<void> check_admission(const Operation& admit, bool is_admitted);

/// n is within 1 … `left`, the number of tokens (drafts included) that are known and not computed;
/// with drafts, n is `left`.
Result<void> check_extend(const Operation& extend, std::int64_t left);

/// Between a verification and its accept nothing else happens to the request.
Result<void> check_is_settled(const Operation& operation, bool is_verifying);

/// The content of a row of the batch when a `compact` moves the rows.
enum class RowUse : std::uint8_t { hole, settled, verifying };

/// compact: each row's number afterwards, -1 for a hole alone, such that those of requests are
/// 0 … count - 1 and none of them waits for an accept. Returns that count.
Result<std::uint32_t> check_mapping(const std::vector<std::int64_t>& mapping,
                                    const std::vector<RowUse>& rows);

/// An accept's n is the number of its tokens.
Result<void> check_accept(const Operation& accept);
/// The accepted tokens are the first n - 1 drafts and one more.
Result<void> check_kept(const Operation& accept, const Tokens& drafts);

}  // namespace lockstep::cache_sim
