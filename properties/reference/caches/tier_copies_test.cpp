// A small model of a state cache with a host tier whose copies are in flight: three requests that
// share a prefix and come again and again, three device slots where four are wanted, one host slot.
// The prefix lies behind a base whose state never leaves the device: what a request falls back on.
// Every order of its steps is played. A copy reads its source where it lands, the latest moment it
// can; its target holds nothing until then.
//
//   L1  a load leaves the state of the prefix that it was asked for
//   L2  nothing is read from a target before its copy has landed
//   L3  nothing writes or frees a source or a target before their copy has ended
//   L4  a request's first forward starts from the state of exactly its admitted length
//
// A sound server breaks none in any order. Each mistake of a known kind breaks one, and the fewest
// steps that show it are told.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

namespace lockstep {
namespace {

constexpr int kDevice = 3, kRequests = 3, kCopies = 3, kNone = -1;

template <class Array>
auto& at(Array& array, int index) {
  return array[static_cast<std::size_t>(index)];
}

/// Prefixes: of all prompts the base and the first token behind it are the same. `cleared` is the
/// state of no token.
enum class Label : std::int8_t { nothing, cleared, base, shared, whole };

struct Copy {
  bool flies = false, loads = false;  ///< else it is a backup
  std::int8_t source = kNone, target = kNone;
  std::int8_t request = kNone;  ///< whose slot the target of a load is; none: the tree's
};

struct Request {
  std::int8_t slot = kNone, admitted = 0, length = 0;  ///< tokens behind the base
  bool waits = false;                                  ///< matched on the device, then passed over
  std::int8_t source = kNone;                          ///< the slot that its match wants copied
};

/// All of it is bytes, so states are compared as such. The tree has one node, of the shared prefix.
struct Server {
  std::array<Label, kDevice> device{};
  std::array<bool, kDevice> device_used{};
  std::array<bool, kDevice> ring{};  ///< tokens since the slot's state, to be replayed over it
  Label host = Label::nothing;
  bool host_used = false;
  std::int8_t node_device = kNone;  ///< the slot of the node's state
  bool node_host = false;
  std::array<Request, kRequests> requests{};
  std::array<Copy, kCopies> copies{};

  std::string bytes() const {
    std::string all(sizeof *this, '\0');
    std::memcpy(all.data(), this, sizeof *this);
    return all;
  }
};
static_assert(std::has_unique_object_representations_v<Server>);

enum class Mistake {
  none,
  reads_before_landing,
  evicts_what_is_backed_up,
  evicts_what_is_loaded,
  keeps_the_length_of_a_failed_load,
  frees_the_target_of_an_aborted_load,
  copies_a_state_that_is_loaded,
  keeps_the_host_copy_of_a_failed_backup,
  takes_a_failed_load_for_landed,
  forgets_the_base_of_a_refused_load,
  keeps_the_source_of_an_older_match,
  loads_below_an_old_ring,
};

class Model {
 public:
  explicit Model(Mistake mistake) : mistake_(mistake) {}

  /// Steps of the shortest run that breaks a law, and the law; empty where none does.
  std::string broken() {
    std::deque<Server> ahead{Server{}};
    before_[ahead.front().bytes()] = {};
    while (!ahead.empty()) {
      const Server now = ahead.front();
      ahead.pop_front();
      for (const auto& [step, next] : steps(now)) {
        if (before_.try_emplace(next.bytes(), now.bytes(), step).second) ahead.push_back(next);
      }
      if (!law_.empty()) return path_to(now).append(law_);
    }
    return "";
  }
  std::size_t states() const { return before_.size(); }

 private:
  using Steps = std::vector<std::pair<std::string, Server>>;

  bool has(Mistake mistake) const { return mistake_ == mistake; }
  void breaks(const std::string& law) {
    if (law_.empty()) law_ = law;
  }

  // --- Slots

  static int free_slot(const Server& s) {
    for (int i = 0; i < kDevice; ++i)
      if (!at(s.device_used, i)) return i;
    return kNone;
  }
  static const Copy* flying(const Server& s, bool loads, int target) {
    for (const Copy& copy : s.copies)
      if (copy.flies && copy.loads == loads && (loads ? copy.target : copy.source) == target)
        return &copy;
    return nullptr;
  }
  static bool loads_fly(const Server& s) {
    for (const Copy& copy : s.copies)
      if (copy.flies && copy.loads) return true;
    return false;
  }
  static bool backup_flies(const Server& s) {
    for (const Copy& copy : s.copies)
      if (copy.flies && !copy.loads) return true;
    return false;
  }
  int take(Server& s) {
    const int slot = free_slot(s);
    if (slot == kNone) return kNone;
    at(s.device_used, slot) = true;
    if (flying(s, true, slot) != nullptr)
      breaks("L3: a slot is handed out while a load flies to it");
    if (flying(s, false, slot) != nullptr)
      breaks("L3: a slot is handed out while a backup reads it");
    at(s.device, slot) = Label::nothing;
    return slot;
  }
  static void release(Server& s, int slot) {
    at(s.device_used, slot) = false;
    at(s.device, slot) = Label::nothing;
  }
  static void write(Server& s, int slot, Label label) {
    at(s.device, slot) = label;
    at(s.ring, slot) = false;
  }
  Label read(const Server& s, int slot) {
    if (flying(s, true, slot) != nullptr) breaks("L2: a slot is read before its load has landed");
    return at(s.device, slot);
  }
  static void fly(Server& s, const Copy& copy) {
    for (Copy& one : s.copies)
      if (!one.flies) {
        one = copy;
        one.flies = true;
        return;
      }
  }
  static int free_copies(const Server& s) {
    int count = 0;
    for (const Copy& copy : s.copies) count += copy.flies ? 0 : 1;
    return count;
  }

  // --- Steps

  Steps steps(const Server& now) {
    Steps all;
    const auto add = [&](const std::string& step, const auto& act) {
      Server next = now;
      const bool was_right = law_.empty();
      if (act(next)) all.emplace_back(step, next);
      if (was_right && !law_.empty()) law_.insert(0, step + ": ");
    };
    for (int r = 0; r < kRequests; ++r) {
      add(fmt::format("admit {}", r), [&](Server& s) { return admit(s, r); });
      add(fmt::format("pass over {}", r), [&](Server& s) { return pass_over(s, r); });
      add(fmt::format("forward {}", r), [&](Server& s) { return forward(s, r); });
      add(fmt::format("checkpoint {}", r), [&](Server& s) { return checkpoint(s, r); });
      add(fmt::format("leave {}", r), [&](Server& s) { return leave(s, r); });
    }
    add("back up", [&](Server& s) { return back_up(s); });
    add("evict", [&](Server& s) { return evict(s); });
    add("evict host", [&](Server& s) { return evict_host(s); });
    for (std::size_t i = 0; i < kCopies; ++i) {
      add(fmt::format("land {}", i), [&](Server& s) { return land(s, i); });
      add(fmt::format("fail {}", i), [&](Server& s) { return fail(s, i); });
    }
    return all;
  }

  /// A request that hits on the device has a slot and what to copy to it, but must wait.
  bool pass_over(Server& s, int r) {
    Request& request = at(s.requests, r);
    if (request.slot != kNone || s.node_device == kNone ||
        flying(s, true, s.node_device) != nullptr)
      return false;
    request.slot = static_cast<std::int8_t>(take(s));
    request.source = s.node_device;
    request.waits = request.slot != kNone;
    return request.waits;
  }

  /// A hit on the device is copied at once. One on the host is loaded into a slot of the node and
  /// into the request's own; without slots for both it is no hit, and the base's state is copied.
  bool admit(Server& s, int r) {
    Request& request = at(s.requests, r);
    if (request.slot != kNone && !request.waits) return false;
    const bool is_loaded = s.node_device != kNone && flying(s, true, s.node_device) != nullptr;
    const bool on_device =
        s.node_device != kNone && (!is_loaded || has(Mistake::copies_a_state_that_is_loaded));
    const bool on_host =
        s.node_host && s.node_device == kNone && !backup_flies(s) && free_copies(s) >= 2;
    const int slot = request.waits ? request.slot : take(s);
    if (slot == kNone) return false;
    const std::int8_t older = request.source;
    request = {.slot = static_cast<std::int8_t>(slot)};
    if (on_device) {
      write(s, slot, read(s, s.node_device));
      request.admitted = request.length = 1;
    } else if (const int of_node = on_host ? take(s) : kNone; of_node == kNone) {
      const bool forgets = on_host && has(Mistake::forgets_the_base_of_a_refused_load);
      write(s, slot, forgets ? Label::cleared : Label::base);
    } else {
      if (has(Mistake::keeps_the_source_of_an_older_match)) request.source = older;
      s.node_device = static_cast<std::int8_t>(of_node);
      fly(s, {.loads = true, .source = 0, .target = static_cast<std::int8_t>(of_node)});
      fly(s, {.loads = true,
              .source = 0,
              .target = static_cast<std::int8_t>(slot),
              .request = static_cast<std::int8_t>(r)});
      request.admitted = request.length = 1;
    }
    return true;
  }

  /// One token more.
  bool forward(Server& s, int r) {
    Request& request = at(s.requests, r);
    if (request.slot == kNone || request.waits || request.length == 2) return false;
    const bool flies = flying(s, true, request.slot) != nullptr;
    if (flies && !has(Mistake::reads_before_landing)) return false;
    const Label wanted = request.length == 0 ? Label::base : Label::shared;
    const Label found = read(s, request.source == kNone ? request.slot : request.source);
    request.source = kNone;
    if (found != wanted && law_.empty())
      breaks(request.length == request.admitted
                 ? "L4: a request starts from another state than that of its admitted length"
                 : "L1: a request goes on from another state than its own");
    ++request.length;
    write(s, request.slot, request.length == 1 ? Label::shared : Label::whole);
    at(s.ring, request.slot) = request.length == 2;
    return true;
  }

  /// The state after the shared token stays in the tree.
  bool checkpoint(Server& s, int r) {
    const Request& request = at(s.requests, r);
    if (request.slot == kNone || request.waits || request.length != 1 || s.node_device != kNone ||
        flying(s, true, request.slot) != nullptr)
      return false;
    const Label own = read(s, request.slot);
    const int slot = take(s);
    if (slot == kNone) return false;
    write(s, slot, own);
    s.node_device = static_cast<std::int8_t>(slot);
    return true;
  }

  /// The request ends, or its client leaves. A slot to which a load flies is freed where that ends.
  bool leave(Server& s, int r) {
    Request& request = at(s.requests, r);
    if (request.slot == kNone) return false;
    const bool flies = flying(s, true, request.slot) != nullptr;
    if (!flies || has(Mistake::frees_the_target_of_an_aborted_load)) release(s, request.slot);
    request = {};
    return true;
  }

  bool back_up(Server& s) {
    if (s.node_device == kNone || s.node_host || s.host_used || free_copies(s) == 0 ||
        flying(s, true, s.node_device) != nullptr)
      return false;
    s.host_used = s.node_host = true;
    s.host = Label::nothing;
    fly(s, {.source = s.node_device, .target = 0});
    return true;
  }

  bool evict(Server& s) {
    if (s.node_device == kNone) return false;
    const bool is_read = flying(s, false, s.node_device) != nullptr;
    const bool is_written = flying(s, true, s.node_device) != nullptr;
    if (is_written || (is_read && !has(Mistake::evicts_what_is_backed_up))) return false;
    release(s, s.node_device);
    s.node_device = kNone;
    return true;
  }

  bool evict_host(Server& s) {
    if (!s.node_host || backup_flies(s)) return false;
    if (loads_fly(s)) {
      if (!has(Mistake::evicts_what_is_loaded)) return false;
      breaks("L3: the host's slot is freed while a load reads it");
    }
    s.node_host = s.host_used = false;
    s.host = Label::nothing;
    return true;
  }

  bool land(Server& s, std::size_t i) {
    Copy& copy = s.copies[i];
    if (!copy.flies) return false;
    const Copy landed = copy;
    copy = {};
    if (landed.loads) {
      at(s.device, landed.target) = s.host;
      if (!has(Mistake::loads_below_an_old_ring)) at(s.ring, landed.target) = false;
      if (s.host != Label::shared)
        breaks("L1: a load leaves another state than the one it was asked for");
      if (at(s.ring, landed.target))
        breaks("L1: tokens of another request are replayed over a loaded state");
      free_of_nobody(s, landed);
      return true;
    }
    s.host = at(s.device, landed.source);
    if (s.host != Label::shared) breaks("L3: the source of a backup has changed before it landed");
    return true;
  }

  /// A copy that ends without having written. A failed backup leaves no host copy; after a failed
  /// load the node is none of the device's, and its request begins anew.
  bool fail(Server& s, std::size_t i) {
    Copy& copy = s.copies[i];
    if (!copy.flies) return false;
    const Copy failed = copy;
    copy = {};
    if (!failed.loads) {
      if (!has(Mistake::keeps_the_host_copy_of_a_failed_backup)) s.node_host = s.host_used = false;
    } else if (failed.request == kNone) {
      release(s, failed.target);
      s.node_device = kNone;
    } else if (!free_of_nobody(s, failed) && !has(Mistake::takes_a_failed_load_for_landed)) {
      Request& request = at(s.requests, failed.request);
      write(s, failed.target, Label::base);
      if (!has(Mistake::keeps_the_length_of_a_failed_load)) request.admitted = request.length = 0;
    }
    return true;
  }

  /// Frees the target of a load whose request has left.
  static bool free_of_nobody(Server& s, const Copy& copy) {
    if (copy.request == kNone || at(s.requests, copy.request).slot == copy.target) return false;
    release(s, copy.target);
    return true;
  }

  std::string path_to(const Server& server) const {
    std::string path, now = server.bytes();
    for (;;) {
      const auto& [earlier, step] = before_.at(now);
      if (step.empty()) return path;
      path.insert(0, step + ", ");
      now = earlier;
    }
  }

  Mistake mistake_;
  std::string law_;
  std::unordered_map<std::string, std::pair<std::string, std::string>> before_;  // state, step
};

TEST(TierCopies, breakNoLawInAnyOrder) {
  Model model(Mistake::none);
  EXPECT_EQ(model.broken(), "");
  RecordProperty("states", static_cast<int>(model.states()));
  EXPECT_GT(model.states(), 8'000u);
}

TEST(TierCopies, ofEachMistakeAreFound) {
  const auto found = [](Mistake mistake) { return Model(mistake).broken(); };
  EXPECT_EQ(found(Mistake::reads_before_landing),
            "admit 0, forward 0, checkpoint 0, back up, land 0, evict, admit 1, forward 1: L2: a "
            "slot is read before its load has landed");
  EXPECT_EQ(found(Mistake::evicts_what_is_backed_up),
            "admit 0, forward 0, checkpoint 0, back up, evict, checkpoint 0: L3: a slot is handed "
            "out while a backup reads it");
  EXPECT_EQ(found(Mistake::evicts_what_is_loaded),
            "admit 0, forward 0, checkpoint 0, back up, land 0, evict, admit 1, evict host: L3: "
            "the host's slot is freed while a load reads it");
  EXPECT_EQ(found(Mistake::keeps_the_length_of_a_failed_load),
            "admit 0, forward 0, checkpoint 0, back up, land 0, evict, admit 1, fail 1, forward 1: "
            "L4: a request starts from another state than that of its admitted length");
  EXPECT_EQ(found(Mistake::frees_the_target_of_an_aborted_load),
            "admit 0, forward 0, checkpoint 0, back up, land 0, evict, admit 1, leave 1, admit 1: "
            "L3: a slot is handed out while a load flies to it");
  EXPECT_EQ(found(Mistake::copies_a_state_that_is_loaded),
            "admit 0, forward 0, checkpoint 0, leave 0, back up, land 0, evict, admit 0, admit 1: "
            "L2: a slot is read before its load has landed");
  EXPECT_EQ(found(Mistake::keeps_the_host_copy_of_a_failed_backup),
            "admit 0, forward 0, checkpoint 0, back up, fail 0, evict, admit 1, land 0: L1: a load "
            "leaves another state than the one it was asked for");
  EXPECT_EQ(found(Mistake::takes_a_failed_load_for_landed),
            "admit 0, forward 0, checkpoint 0, back up, land 0, evict, admit 1, fail 1, forward 1: "
            "L4: a request starts from another state than that of its admitted length");
  EXPECT_EQ(
      found(Mistake::forgets_the_base_of_a_refused_load),
      "admit 0, forward 0, checkpoint 0, admit 1, back up, land 0, evict, admit 2, forward 2: "
      "L4: a request starts from another state than that of its admitted length");
  EXPECT_EQ(
      found(Mistake::keeps_the_source_of_an_older_match),
      "admit 0, forward 0, checkpoint 0, pass over 1, back up, land 0, evict, admit 1, land 1, "
      "forward 1: L2: a slot is read before its load has landed");
  EXPECT_EQ(
      found(Mistake::loads_below_an_old_ring),
      "admit 0, forward 0, checkpoint 0, forward 0, leave 0, back up, land 0, evict, admit 0, "
      "land 1: L1: tokens of another request are replayed over a loaded state");
}

}  // namespace
}  // namespace lockstep
