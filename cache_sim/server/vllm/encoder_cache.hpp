// The cache of encoded images, as in vLLM 0.33 (vllm/v1/core/encoder_cache_manager.py). Requests
// that send the same image share its entry, which takes as many places as the image has tokens. An
// entry that no request needs stays until its places are needed; the oldest goes first.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <utility>

#include "reference/protocol/schedule.hpp"

namespace lockstep::cache_sim {

class EncoderCache {
 public:
  /// By its tokens: the same tokens are the same image.
  struct Image {
    std::uint64_t digest;
    std::int64_t size;
  };
  using Input = std::uint32_t;  ///< the how manyeth image of a request

  explicit EncoderCache(std::int64_t places) : free_(places) {}

  /// The request needs the image; false where it is not there.
  bool take(RequestNumber request, Input input, const Image& image);
  /// Whether there is room for it beside `planned` places; makes it.
  bool make_room(const Image& image, std::int64_t planned);
  /// It will be encoded; there is room.
  void put(RequestNumber request, Input input, const Image& image);
  void release(RequestNumber request, Input input);
  void release_all(RequestNumber request);
  /// Images that the request needs, ascending.
  const std::map<Input, std::uint64_t>& of(RequestNumber request) const;

 private:
  struct Entry {
    std::int64_t size;
    std::set<std::pair<RequestNumber, Input>> users;
  };
  std::map<std::uint64_t, Entry> entries_;  // by digest
  std::map<RequestNumber, std::map<Input, std::uint64_t>> needed_;
  std::deque<std::uint64_t> unused_;  // the oldest first
  std::int64_t free_;
};

}  // namespace lockstep::cache_sim
