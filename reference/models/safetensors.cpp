#include "reference/models/safetensors.hpp"

#include <fmt/format.h>
#include <bit>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>
#include <utility>

#include "reference/models/config_fields.hpp"

namespace lockstep::reference {
namespace {

using nlohmann::json;

constexpr std::uint64_t kLargestHeader =
    100'000'000;  // bytes; the limit of the format's own reader

struct Bytes {
  std::string header;
  std::string data;
};

Result<Bytes> read_bytes(const std::string& path) {
  Result<std::ifstream> file = open_file(path);
  if (!file) return tl::unexpected(file.error());
  std::string all((std::istreambuf_iterator<char>(*file)), {});
  if (all.size() < 8) return fail(path + ": is shorter than the 8 bytes of a header's size");
  std::uint64_t size = 0;
  for (int i = 7; i >= 0; --i)
    size = size << 8 | static_cast<unsigned char>(all[static_cast<std::size_t>(i)]);
  if (size > kLargestHeader || size > all.size() - 8)
    return fail(path + ": its header has " + std::to_string(size) +
                " bytes, and after its size the file has " + std::to_string(all.size() - 8));
  return Bytes{all.substr(8, size), all.substr(8 + size)};
}

/// The list of integers, all at least 0, in `field`.
Result<std::vector<std::int64_t>> sizes_of(const json& object, const char* field,
                                           const std::string& place) {
  const auto found = object.find(field);
  if (found == object.end() || !found->is_array()) return fail(place + field + " is no list");
  std::vector<std::int64_t> sizes;
  for (const json& size : *found) {
    if (!size.is_number_unsigned() || size.get<std::uint64_t>() > (std::uint64_t{1} << 40))
      return fail(place + field + " has " + size.dump() + ", no count of elements or bytes");
    sizes.push_back(size.get<std::int64_t>());
  }
  return sizes;
}

float bf16(const char* bytes) {
  std::uint16_t high = 0;
  std::memcpy(&high, bytes, sizeof high);
  return std::bit_cast<float>(std::uint32_t{high} << 16);
}

Result<StoredTensor> read_tensor(const json& object, const std::string& data,
                                 const std::string& place) {
  if (!object.is_object()) return fail(place + "is no object");
  const json dtype = object.value("dtype", json());
  if (dtype != "F32" && dtype != "BF16")
    return fail(place + "dtype is " + dtype.dump() + "; F32 and BF16 are read");
  const auto shape = sizes_of(object, "shape", place);
  if (!shape) return tl::unexpected(shape.error());
  const auto offsets = sizes_of(object, "data_offsets", place);
  if (!offsets) return tl::unexpected(offsets.error());
  const std::size_t width = dtype == "F32" ? 4 : 2;
  std::size_t count = 1;
  for (const std::int64_t extent : *shape) {
    if (extent > 0 && count > (std::size_t{1} << 40) / static_cast<std::size_t>(extent))
      return fail(place + "shape has more elements than a file holds");
    count *= static_cast<std::size_t>(extent);
  }
  if (offsets->size() != 2 || (*offsets)[0] > (*offsets)[1] ||
      static_cast<std::size_t>((*offsets)[1]) > data.size())
    return fail(place + "data_offsets lie outside of the " + std::to_string(data.size()) +
                " bytes of data");
  if (static_cast<std::size_t>((*offsets)[1] - (*offsets)[0]) != count * width)
    return fail(place + "data_offsets hold " + std::to_string((*offsets)[1] - (*offsets)[0]) +
                " bytes, its shape needs " + std::to_string(count * width));
  StoredTensor tensor{dtype.get<std::string>(), *shape, std::vector<float>(count)};
  const char* const first = data.data() + (*offsets)[0];
  if (width == 4 && count > 0) std::memcpy(tensor.values.data(), first, count * width);
  if (width == 2)
    for (std::size_t i = 0; i < count; ++i) tensor.values[i] = bf16(first + 2 * i);
  return tensor;
}

/// Refuses tensors, each read_tensor() took, of which two share a byte.
Result<void> check_apart(const json& header, const std::string& path) {
  std::set<std::tuple<std::int64_t, std::int64_t, std::string>> places;  // begin, end, name
  for (const auto& [name, object] : header.items()) {
    if (name == "__metadata__") continue;
    const json& offsets = object.at("data_offsets");
    if (offsets[0] != offsets[1]) places.emplace(offsets[0], offsets[1], name);
  }
  std::int64_t last_end = 0;
  const std::string* last = nullptr;
  for (const auto& [begin, end, name] : places) {
    if (begin < last_end)
      return fail(fmt::format("{}: {}: data_offsets overlap those of {}", path, name, *last));
    last_end = end;
    last = &name;
  }
  return {};
}

}  // namespace

Result<std::map<std::string, StoredTensor>> read_safetensors(const std::string& path) {
  const auto bytes = read_bytes(path);
  if (!bytes) return tl::unexpected(bytes.error());
  const json header = json::parse(bytes->header, nullptr, false);
  if (!header.is_object()) return fail(path + ": its header is no JSON object");
  std::map<std::string, StoredTensor> tensors;
  for (const auto& [name, object] : header.items()) {
    if (name == "__metadata__") continue;
    std::string place = path;
    place.append(": ").append(name).append(": ");
    auto tensor = read_tensor(object, bytes->data, place);
    if (!tensor) return tl::unexpected(tensor.error());
    tensors.emplace(name, std::move(*tensor));
  }
  if (const auto apart = check_apart(header, path); !apart) return tl::unexpected(apart.error());
  return tensors;
}

Result<void> write_safetensors(const std::string& path,
                               const std::map<std::string, WrittenTensor>& tensors) {
  json header = json::object();
  std::size_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const std::size_t begin = std::exchange(end, end + tensor.values.size_bytes());
    header[name] = {{"dtype", "F64"}, {"shape", tensor.shape}, {"data_offsets", {begin, end}}};
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  const std::uint64_t size = text.size();
  std::ofstream file(path, std::ios::binary);
  file.write(reinterpret_cast<const char*>(&size), sizeof size);
  file << text;
  for (const auto& [name, tensor] : tensors)
    file.write(reinterpret_cast<const char*>(tensor.values.data()),
               static_cast<std::streamsize>(tensor.values.size_bytes()));
  file.close();
  return file ? Result<void>() : fail(path + ": cannot be written");
}

}  // namespace lockstep::reference
