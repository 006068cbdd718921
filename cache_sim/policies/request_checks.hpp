// Checks of bad input that are the same for every cache, made before the cache's own rules. Oracles
// have their own.
#pragma once

#include <cstdint>
#include <vector>

#include "reference/base/result.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// No admitted request has the operation's name.
tl::unexpected<Error> no_such_request(const Operation& operation);

/// Whether the request ends and leaves nothing.
bool discards(const Operation& operation);

/// At least one token, of which the prompt is a part; the name is new.
Result<void> check_admission(const Operation& admit, bool is_admitted);

/// n is within 1 … `left`, the tokens that are known and not computed, drafts among them; a
/// verification takes all of them.
Result<void> check_extend(const Operation& extend, std::int64_t left);

/// Between a verification and its accept nothing else happens to the request.
Result<void> check_is_settled(const Operation& operation, bool is_verifying);

/// What stands in a row of a batch when rows are to change places.
enum class RowUse : std::uint8_t { hole, settled, verifying };

/// compact: each row's number afterwards, -1 for a hole alone, such that those of requests are
/// 0 … count - 1 and none of them waits for an accept. Returns that count.
Result<std::uint32_t> check_mapping(const std::vector<std::int64_t>& mapping,
                                    const std::vector<RowUse>& rows);

/// n is the number of tokens.
Result<void> check_accept(const Operation& accept);
/// The tokens are the first drafts and one more.
Result<void> check_kept(const Operation& accept, const Tokens& drafts);

}  // namespace lockstep::cache_sim
