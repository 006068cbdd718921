// The storage behind SGLang's host tier, literally by rules [1.14] of sglang.md: a set of prefixes,
// the reader that brings them to the host, and what it tells the scheduler. Only lengths move here;
// that each prefix's KV and state are its own is by definition.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>

#include "reference/caches/sglang_prefix_map.hpp"

namespace lockstep::reference {

/// A prefetch: tokens of `whole` beyond its anchor, which is a stored prefix or empty.
struct SglangFetch {
  Prefix anchor;
  std::int64_t host_begin = 0;  ///< where the anchor's locked edge begins
  Prefix whole;
  std::int64_t asked = 0;    ///< tokens that count for the quota
  std::int64_t length = 0;   ///< tokens beyond the anchor that are stored, later those with room
  bool has_room = false;     ///< slots of the host are taken for them and a state
  std::int64_t arrived = 0;  ///< of these tokens, as the scheduler has heard
  bool state_over = false, state_arrived = false;
  bool is_stopped = false;

  Prefix end() const { return whole.first(anchor.size() + length); }
};

class SglangStorage {
 public:
  struct News {
    std::int64_t fetch;
    std::optional<std::int64_t> arrived;
    std::optional<bool> state;
    bool over = false;
  };

  /// Tokens of `whole` beyond the first `from` that are stored without a gap, up to the last one at
  /// which there is a state.
  std::int64_t longest(const Prefix& whole, std::int64_t from) const;
  /// Stores the KV of the tokens of `end` beyond `begin`, and perhaps its state.
  void put(const Prefix& end, std::int64_t begin, bool with_state);
  void clear();

  void read(std::int64_t fetch);
  bool end_read(bool fails);

  std::map<std::int64_t, SglangFetch> fetches;  ///< by number
  std::deque<std::int64_t> looked_up;           ///< fetches of which the scheduler has not heard
  std::deque<News> news;
  std::deque<std::int64_t> kv_back, states_back;  ///< slots of the host that will be free
  std::int64_t occupied = 0;
  bool is_quiet() const {
    return looked_up.empty() && news.empty() && line_.empty() && kv_back.empty() &&
           states_back.empty();
  }

 private:
  /// What the reader is about, with what it has found when it began.
  struct Reading {
    bool of_state;
    std::int64_t found;
  };
  void go_on();
  void read_state();
  void over();

  std::set<Prefix> pages_, states_;
  std::deque<std::int64_t> line_;
  std::optional<Reading> reading_;
};

}  // namespace lockstep::reference
