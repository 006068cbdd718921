// SGLang's extra_buffer, 0.5.23: the subject that follows its rules (sglang.md, 1.8) literally.
// This oracle gives the decision digest of SGLang's Rust and Python tree cores on `sglang-w1`.
//
//   here                 SGLang
//   tracking slots       mamba_ping_pong_track_buffer
//   latest, earlier      mamba_last_track_seqlen and the one before, each with its buffer index
//   write                mamba_next_track_idx
#include <memory>
#include <numeric>
#include <utility>

#include "reference/caches/sglang_oracle.hpp"

namespace lockstep::reference {
namespace {

class SglangExtraBufferOracle final : public SglangOracle {
 public:
  explicit SglangExtraBufferOracle(const Config& config) : SglangOracle(config, Variant{}) {}

 private:
  int tracking_slots() const override { return config_.number("lazy") != 0 ? 1 : 2; }

  std::int64_t decode_grid() const { return std::lcm(grid(), config_.number("track_interval")); }

  void advanced(Request& request, std::int64_t from, Forward forward) override {
    const std::int64_t to = request.computed;
    if (forward == Forward::chunk) return track_chunk(request, from, to);
    if (is_lazy() && forward == Forward::verification) return verified_lazily(request, from);
    for (std::int64_t position = from + 1; position <= to; ++position) {
      const bool passed_later = position + decode_grid() <= to;
      if (position % decode_grid() != 0) continue;
      if (is_lazy())
        step_lazily(request, position);
      else if (forward == Forward::decode || !passed_later)
        track_step(request, position);
    }
  }

  void track_chunk(Request& request, std::int64_t from, std::int64_t to) const {
    if (to - from < grid()) return;
    std::int64_t position = to - (to - from) % grid();
    const std::int64_t branch = request.branch;
    if (from < branch && branch < position && (branch - from) % grid() == 0) position = branch;
    if (position % config_.page != 0) return;
    request.latest = {next_slot(request), position};
  }

  void track_step(Request& request, std::int64_t position) const {
    const Tracked before = request.latest;
    request.latest = {next_slot(request), position};
    request.earlier = request.latest.slot == before.slot ? Tracked{} : before;
  }

  /// The slot that was not written last; the only one where there is one.
  std::size_t next_slot(Request& request) const {
    const std::size_t slot = request.write;
    if (!is_lazy()) request.write = (slot + 1) % request.tracking.size();
    return slot;
  }

  // Lazy: `write` is the slot that was written last, and `latest` the state that is kept.

  bool is_lazy() const { return config_.number("lazy") != 0; }

  static StateSlot& second(Request& request) {
    request.tracking.resize(2);
    return request.tracking[1 - request.write];
  }

  /// Takes a second slot, so that a step does not write over the kept state; false where none is
  /// free.
  bool reserve(Request& request) {
    if (slots_free() == 0) {
      request.latest = {};
      return false;
    }
    Evicted nothing;
    second(request) = take_slot(nothing);
    return true;
  }

  void step_lazily(Request& request, std::int64_t position) {
    if (!second(request).exists() && reserve(request)) {
      request.write = 1 - request.write;
    } else {  // over what the slot holds
      if (request.latest.slot == request.write) request.latest = {};
      drop_under_way(request, request.write);
    }
    request.under_way.push_back({request.write, position});
  }

  void results_came(Request& request) override {
    while (!request.under_way.empty() && request.under_way.front().length <= request.committed()) {
      const Tracked arrived = request.under_way.front();
      request.under_way.pop_front();
      keep(request, arrived);
    }
  }

  static void drop_under_way(Request& request, std::size_t slot) {
    std::erase_if(request.under_way, [&](const Tracked& state) { return state.slot == slot; });
  }

  void keep(Request& request, const Tracked& state) {
    request.write = state.slot;
    request.latest = state;
    release_slot(std::exchange(second(request), StateSlot::none()));
    drop_under_way(request, 1 - state.slot);
  }

  void before_verification(Request& request, std::int64_t tokens) override {
    if (!is_lazy() || second(request).exists()) return;
    const std::int64_t passed = (request.computed + 2 * tokens) / decode_grid();
    if (passed != request.computed / decode_grid()) reserve(request);
  }

  void verified_lazily(Request& request, std::int64_t from) {
    const std::int64_t position = request.computed / decode_grid() * decode_grid();
    if (position <= from) return;
    if (second(request).exists())
      keep(request, {1 - request.write, position});
    else
      request.latest = {request.write, position};
  }

  /// The later one of the two that stands for at most `most` tokens and is not stored yet.
  static Tracked tracked_within(const Request& request, std::int64_t most) {
    const Tracked fits = request.latest.length <= most ? request.latest : request.earlier;
    return fits.length <= most && fits.length > request.protected_size ? fits : Tracked{};
  }

  std::optional<Stored> store_unfinished(Request& request, std::int64_t up_to) override {
    const auto [slot, length] = tracked_within(request, up_to);
    if (length == 0) return Stored{false, request.protected_size};
    if (is_lazy() && slots_free() == 0 && request.state_locked) {
      const Prefix start = request.known.first(request.protected_size);
      cached_.unlock(start, true);
      cached_.lock(start, false);
      request.state_locked = false;
    }
    Evicted unreported;
    const StateSlot fresh = take_slot(unreported);
    if (!fresh.exists()) return std::nullopt;
    const StateSlot given = std::exchange(request.tracking[slot], fresh);
    slide(request, length - 1, 1);
    const bool exist = store(request, length, given);
    move_lock(request, length);
    if (exist) release_slot(given);
    if (request.latest.length <= up_to) request.latest = {};
    request.earlier = {};
    return Stored{exist, length};
  }

  Stored store_finished(Request& request, std::int64_t owned) override {
    const auto [slot, length] = tracked_within(request, owned);
    if (length == 0) return {true, request.protected_size};
    StateSlot& given = request.tracking[slot];
    const bool exist = store(request, length, given);
    if (!exist) given = StateSlot::none();  // the map's now
    return {exist, length};
  }
};

std::unique_ptr<Subject> make_extra_buffer(const SubjectOptions& options) {
  return std::make_unique<SglangExtraBufferOracle>(options.config);
}

const Registration<OracleEntry> kExtraBuffer{{"sglang-extra-buffer", make_extra_buffer}};

}  // namespace
}  // namespace lockstep::reference
