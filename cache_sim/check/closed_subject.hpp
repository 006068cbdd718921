// Checks of a subject without access to its insides, such as a child process: its numbers are
// possible, and it reuses only tokens that it was asked to compute.
#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "cache_sim/base/prefix_trie.hpp"
#include "reference/base/finding.hpp"
#include "reference/protocol/config.hpp"
#include "reference/protocol/operation.hpp"

namespace lockstep::cache_sim {

/// Promises of a child beyond the rules of all, each in whole multiples of so many tokens; 0: none.
struct Promises {
  std::int64_t rehits = 0;  ///< a prompt that goes on from a finished request finds it again
  std::int64_t chunks = 0;  ///< a chunk that is not the last of a prompt ends on a multiple
  std::int64_t locks = 0;   ///< so many tokens are one unit of kv_locked=, and hits are locked
};

/// Follows the operations that were sent and the answers that came. A prefix can be cached once its
/// tokens are computed, which the answers to `extend` count. That holds for prompts and outputs
/// alike, also of a request that ended in the middle of its prefill. A prefix under another
/// adapter, another salt, or behind another image is another prefix.
class ClosedSubject {
 public:
  /// `kv_total`: what its numbers of KV are parts of, the pool's tokens or blocks.
  ClosedSubject(const Config& config, std::int64_t kv_total, const Promises& promises = {})
      : config_(config), kv_total_(kv_total), promises_(promises) {}

  void check(const Operation& operation, const Reply& reply, Findings& findings);

 private:
  /// The content of a prefix. Tokens of images are replaced by tokens that depend on the image's
  /// name; `space` stands for the salt and the adapter.
  struct Content {
    Tokens tokens;
    Name space;
  };
  /// The token that was sampled after a prefix, and the first request that sampled it.
  struct Sampled {
    std::int64_t output = 0;
    Name id;
  };
  struct Request {
    Tokens known;
    Name space;
    std::int64_t computed = 0;  // by the answers
    std::int64_t asked = 0;     // by the operations
    std::int64_t hit = 0;       // tokens that it was given by `cached=`
    // Tokens of an open verification that the answer did not count as computed.
    std::int64_t unanswered = 0;
    bool verifies = false;  // the last extend was a verification, and its accept has not come
  };

  void check_numbers(const Operation& operation, const Reply& reply, Findings& findings) const;
  std::int64_t largest(ReplyField field, const Operation& operation) const;
  void check_sums(const Reply& reply, Findings& findings) const;
  void check_locks(const Reply& reply, Findings& findings) const;
  void check_all_free(const Operation& operation, const Reply& reply, Findings& findings);
  void check_chunk(const Operation& operation, const Reply& reply, Findings& findings) const;
  void check_progress(const Operation& operation, Findings& findings) const;
  void check_output(const Operation& operation, const Reply& reply, Findings& findings);
  static Content content_of(const Operation& admission);
  std::int64_t most_cached(const Content& prompt) const;
  std::int64_t least_cached(const Content& prompt) const;
  std::int64_t in_pages(std::int64_t tokens) const;
  void follow_promise(const Operation& operation);
  void follow(const Operation& operation, const Reply& reply);
  void end(Name id);
  void keep(const Request& request);
  void follow_sequence(const Operation& operation, const Reply& reply, Request& request);
  static void follow_request(const Operation& operation, const Reply& reply, Request& request);
  const Request* find(Name id) const;

  Config config_;
  std::int64_t kv_total_;
  PrefixTrie computed_;                        // by requests that have ended
  std::map<std::uint32_t, Request> requests_;  // running ones, by Name::index()
  std::map<std::uint32_t, Content> captured_;  // by Name::index()
  /// By space and digest of the prefix.
  std::map<std::pair<std::uint32_t, std::uint64_t>, Sampled> sampled_;
  std::int64_t locks_ = 0;     // of tree verbs
  bool only_requests_ = true;  // no verb has come that can hold memory without a request
  bool flushed_ = false;       // nothing but checks has come since a flush
  std::int64_t kv_free_ = 0;   // the most that an answer has said
  std::int64_t states_free_ = 0;
  Promises promises_;
  bool promise_ends_ = false;      // something was evicted, moved or stored otherwise
  std::vector<Content> finished_;  // all tokens of requests that were stored at their end
  std::int64_t ended_tokens_ = 0;  // of all requests that have ended, in whole pages
  std::int64_t states_taken_ = 0;  // that requests and checkpoints may have left
};

}  // namespace lockstep::cache_sim
