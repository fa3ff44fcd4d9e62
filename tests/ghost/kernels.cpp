// A launch hands over an array of pointers to arguments, without their types; the types stand in the mangled name.
#include "kernels.h"

#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "events.h"

namespace {

struct Argument {
  size_t position;
  size_t pointers;  // 1, or those of a std::array
  bool reads;       // of a single pointer: it is one to const
};

// The types between the last pair of parentheses at the outermost level.
std::vector<std::string> parameter_types(const std::string& signature) {
  const size_t end = signature.rfind(')');
  if (end == std::string::npos) return {};
  int depth = 0;
  size_t begin = end;
  while (begin-- > 0) {
    const char c = signature[begin];
    if (c == ')' || c == '>') depth++;
    if (c == '<') depth--;
    if (c == '(' && depth-- == 0) break;
  }
  std::vector<std::string> out;
  std::string one;
  depth = 0;
  for (size_t i = begin + 1; i < end; i++) {
    const char c = signature[i];
    if (c == '<' || c == '(' || c == '{' || c == '[') depth++;
    if (c == '>' || c == ')' || c == '}' || c == ']') depth--;
    if (c == ',' && depth == 0) {
      out.push_back(one);
      one.clear();
    } else if (!one.empty() || c != ' ') {
      one += c;
    }
  }
  out.push_back(one);
  return out;
}

std::vector<Argument> arguments_of(const std::string& mangled) {
  int status = 0;
  char* name = abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, &status);
  if (status) return {};
  const std::vector<std::string> types = parameter_types(name);
  free(name);
  std::vector<Argument> out;
  for (size_t i = 0; i < types.size(); i++) {
    const std::string& type = types[i];
    if (type.rfind("std::array<char*, ", 0) == 0)
      out.push_back({i, strtoul(type.c_str() + strlen("std::array<char*, "), nullptr, 10), false});
    else if (!type.empty() && type.back() == '*')
      out.push_back({i, 1, type.find(" const*") != std::string::npos});
  }
  return out;
}

}  // namespace

std::string kernel_memory(const std::string& mangled, void** arguments) {
  if (!arguments) return "";
  static std::mutex guard;
  static std::unordered_map<std::string, std::vector<Argument>> known;
  std::vector<Argument> wanted;
  {
    std::lock_guard<std::mutex> hold(guard);
    auto found = known.find(mangled);
    if (found == known.end()) found = known.emplace(mangled, arguments_of(mangled)).first;
    wanted = found->second;
  }
  GhostMemory memory;
  for (const Argument& a : wanted) {
    const auto* held = static_cast<void* const*>(arguments[a.position]);
    for (size_t i = 0; i < a.pointers; i++) {
      if (a.reads || i) memory.reads(held[i]);
      else memory.writes(held[i]);
    }
  }
  return memory.text();
}
