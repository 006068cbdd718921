#include "kernels/torch/static_kv/packages.hpp"

#include <ATen/ATen.h>
#include <openssl/evp.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace lockstep::static_kv {
namespace {

using nlohmann::json;
using torch::inductor::AOTIModelPackageLoader;

constexpr int kFormat = 4;

constexpr const char* kDynamic = "dynamic";  ///< name of the bucket for any length

constexpr const char* kForms[] = {"buckets", "in_place"};  ///< keys of the lists of packages

std::string text_of(const json& value) {
  return value.is_string() ? value.get<std::string>() : value.dump();
}

/// SHA-256 of a file, in hexadecimal digits.
Result<std::string> sha256_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return fail(path + ": cannot be read");
  const std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> digest(EVP_MD_CTX_new(),
                                                                  EVP_MD_CTX_free);
  EVP_DigestInit_ex(digest.get(), EVP_sha256(), nullptr);
  std::vector<char> block(1 << 20);
  while (file.read(block.data(), static_cast<std::streamsize>(block.size())), file.gcount() > 0)
    EVP_DigestUpdate(digest.get(), block.data(), static_cast<std::size_t>(file.gcount()));
  std::array<unsigned char, EVP_MAX_MD_SIZE> bytes{};
  unsigned size = 0;
  EVP_DigestFinal_ex(digest.get(), bytes.data(), &size);
  std::string text;
  for (unsigned i = 0; i < size; ++i)
    for (const int shift : {4, 0}) text += "0123456789abcdef"[bytes[i] >> shift & 15];
  return text;
}

Result<json> read_index(const std::string& path) {
  std::ifstream file(path);
  if (!file) return fail(path + ": cannot be read");
  json index = json::parse(file, nullptr, false);
  if (!index.is_object()) return fail(path + ": is no JSON object");
  if (index.value("format", json()) != kFormat)
    return fail(path + ": format is " + index.value("format", json()).dump() +
                "; this runtime reads " + std::to_string(kFormat));
  if (index.value("torch", json()) != TORCH_VERSION)
    return fail(path + ": torch is " + index.value("torch", json()).dump() +
                "; this runtime was built with " + TORCH_VERSION);
  for (const auto& [field, served] :
       {std::pair{"dtype", json{"float32", "bfloat16"}}, {"device", json{"cpu", "cuda"}}}) {
    const json found = index.value(field, json());
    if (std::find(served.begin(), served.end(), found) == served.end())
      return fail(path + ": " + field + " is " + found.dump() + "; packages of " +
                  served[0].get<std::string>() + " and " + served[1].get<std::string>() +
                  " are served");
  }
  for (const char* field : {"rows", "positions"}) {
    const json found = index.value(field, json());
    if (!found.is_number_unsigned() || found < 1 || found > (1 << 20))
      return fail(path + ": " + field + " is " + found.dump() + ", no size from 1 to 1048576");
  }
  const json buckets = index.value("buckets", json());
  if (!buckets.is_object() || !buckets.contains("1"))
    return fail(path + ": buckets has no bucket of one token, which decodes need");
  for (const char* form : kForms) {
    const json list = index.value(form, json::object());
    if (!list.is_object()) return fail(path + ": " + form + " is no list of packages by bucket");
    for (const auto& [Q, file_name] : list.items()) {
      const bool is_number = !Q.empty() && Q.size() <= 7 && Q.front() != '0' &&
                             Q.find_first_not_of("0123456789") == std::string::npos;
      if (!(is_number || Q == kDynamic) || !file_name.is_string())
        return fail(path + ": " + form + " has \"" + Q +
                    "\", no number of queries and a file's name");
      if (is_number && std::stoll(Q) > index["positions"])
        return fail(path + ": " + form + " has " + Q + ", more than the " +
                    index["positions"].dump() + " positions");
    }
  }
  return index;
}

/// Loads one package, of a form in kForms, and compares its metadata with the folder's.
Result<Program> load(const std::string& folder, const std::string& form, const std::string& Q,
                     const json& index) {
  const std::string path = folder + "/" + index[form][Q].get<std::string>();
  if (!std::filesystem::is_regular_file(path))
    return fail(path + ": cannot be read; static_kv.json has a bucket of " + Q + " there");
  std::shared_ptr<AOTIModelPackageLoader> loader;
  try {
    // Single-threaded (the last argument): a run then queries no event of other runs, which a graph
    // capture forbids.
    loader = std::make_shared<AOTIModelPackageLoader>(path, "model", index["device"] == "cuda");
  } catch (const std::exception& error) {
    const std::string said = error.what();
    return fail(path + ": is no package that can be loaded: " + said.substr(0, said.find('\n')));
  }
  auto words = loader->get_metadata();
  json expected = index;
  for (const char* list : kForms) expected.erase(list);
  expected["form"] = form;
  expected["bucket"] = Q;
  for (const auto& [name, value] : expected.items())
    if (words[name] != text_of(value))
      return fail(path + ": its " + name + " is \"" + words[name] + "\", static_kv.json says \"" +
                  text_of(value) + "\"");
  return [loader](const std::vector<at::Tensor>& inputs) { return loader->run(inputs); };
}

}  // namespace

Result<Tokens> stop_tokens(const std::string& folder) {
  const std::string path = folder + "/generation_config.json";
  std::ifstream file(path);
  if (!file) return fail(path + ": cannot be read");
  const json config = json::parse(file, nullptr, false);
  if (!config.is_object()) return fail(path + ": is no JSON object");
  json stop = config.value("eos_token_id", json());
  if (stop.is_null()) return Tokens{};
  if (!stop.is_array()) stop = json::array({stop});
  for (const json& token : stop)
    if (!token.is_number_unsigned())
      return fail(path + ": eos_token_id has " + token.dump() + ", no token");
  return stop.get<Tokens>();
}

Result<Programs> load_packages(const std::string& folder) {
  const auto index = read_index(folder + "/static_kv.json");
  if (!index) return tl::unexpected(index.error());
  const std::string weights = folder + "/model.safetensors";
  const auto digest = sha256_of(weights);
  if (!digest) return tl::unexpected(digest.error());
  if (index->value("weights", json()) != *digest)
    return fail(weights + ": its SHA-256 is not the one of static_kv.json's weights");
  auto checkpoint = reference::read_qwen3(folder);
  if (!checkpoint) return tl::unexpected(checkpoint.error());
  const auto& c = checkpoint->config;
  const bool on_gpu = (*index)["device"] == "cuda", halves = (*index)["dtype"] == "bfloat16";
  if (on_gpu && !at::hasCUDA())
    return fail(folder + "/static_kv.json: device is \"cuda\", and there is no GPU");
  Programs programs{.config = c,
                    .rows = (*index)["rows"],
                    .positions = (*index)["positions"],
                    .head = {},
                    .buckets = {}};
  auto& head = checkpoint->weights.at(c.tie_word_embeddings ? "model.embed_tokens.weight"
                                                            : "lm_head.weight");
  programs.head = at::from_blob(head.data(), {c.vocab_size, c.hidden_size}, at::kFloat)
                      .to(on_gpu ? at::kCUDA : at::kCPU, halves ? at::kBFloat16 : at::kFloat, false,
                          /*copy=*/true);
  for (const char* form : kForms) {
    const json list = index->value(form, json::object());
    for (const auto& [Q, file] : list.items()) {
      auto program = load(folder, form, Q, *index);
      if (!program) return tl::unexpected(program.error());
      auto& programs_of = form == std::string("in_place") ? programs.in_place : programs.buckets;
      if (Q == kDynamic)  // comes last, so that lengths with a bucket of their own keep it
        for (std::int64_t n = 2; n <= programs.positions; ++n) programs_of.emplace(n, *program);
      else
        programs_of.emplace(std::stoll(Q), std::move(*program));
    }
  }
  return programs;
}

}  // namespace lockstep::static_kv
