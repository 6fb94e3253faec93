// A device beside the CPU, for machines without an accelerator: its tensors lie in main memory, under another name.
//
// torch treats them as it treats a GPU's: they can't be given to numpy, and an operation on tensors of both devices is
// an error, but for copies and for indices of either. Whatever has no kernel here is computed by the CPU's.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <cstdlib>
#include <cstring>
#include <set>
#include <stdexcept>
#include <string>

using at::Tensor;
using Sizes = c10::SymIntArrayRef;
using MaybeTensor = std::optional<Tensor>;

namespace {

void release(void* memory) { std::free(memory); }

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    // Aligned as the CPU's: its products may round otherwise where memory lies otherwise.
    void* memory = n ? std::aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    return {memory, memory, &release, c10::Device(c10::DeviceType::PrivateUse1, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
Memory memory;
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &memory);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// The CPU's tensor of the same memory.
Tensor here(const Tensor& t) {
  if (t.device().is_cpu()) return t;
  auto storage = t.storage();
  const auto n = static_cast<int64_t>(storage.nbytes() / t.element_size());
  auto flat = at::from_blob(const_cast<void*>(storage.data()), {n}, [storage](void*) {}, t.options().device(at::kCPU));
  return flat.as_strided(t.sizes(), t.strides(), t.storage_offset());
}

MaybeTensor here(const MaybeTensor& t) { return t && t->defined() ? MaybeTensor(here(*t)) : std::nullopt; }

Tensor empty(Sizes size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>, std::optional<c10::Device>,
             std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(Sizes size, Sizes stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                     std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                           KEYS, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  at::AutoDispatchBelowADInplaceOrView guard;
  here(to).copy_(here(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar item(const Tensor& t) { return here(t).item(); }
Tensor view(const Tensor& t, Sizes size) { return at::native::view(t, C10_AS_INTARRAYREF_SLOW(size)); }

Tensor as_strided(const Tensor& t, Sizes size, Sizes stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

Tensor reshape_alias(const Tensor& t, Sizes size, Sizes stride) {
  return at::native::_reshape_alias(t, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

Tensor unfold(const Tensor& t, int64_t dim, int64_t size, int64_t step) { return at::native::unfold(t, dim, size, step); }

const Tensor& resize(const Tensor& t, Sizes size, std::optional<c10::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto n = static_cast<size_t>(c10::multiply_integers(sizes)) * t.element_size();
  auto storage = t.storage();
  if (n > storage.nbytes()) {
    auto larger = memory.allocate(n);
    if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr(std::move(larger));
    storage.set_nbytes(n);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return t;
}

Tensor& set_storage(Tensor& t, at::Storage storage, c10::SymInt offset, Sizes size, Sizes stride) {
  auto* inner = t.unsafeGetTensorImpl();
  inner->set_storage_keep_dtype(std::move(storage));
  inner->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  inner->set_storage_offset(offset.expect_int());
  return t;
}

// Without an alias in its schema: the fallback would lose what it writes into the running statistics.
std::tuple<Tensor, Tensor, Tensor> batch_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                                              const MaybeTensor& mean, const MaybeTensor& var, bool training,
                                              double momentum, double eps) {
  at::AutoDispatchBelowADInplaceOrView guard;
  auto [out, saved_mean, saved_var] = at::native_batch_norm(here(x), here(weight), here(bias), here(mean), here(var),
                                                            training, momentum, eps);
  return {out.to(x.device()), saved_mean.to(x.device()), saved_var.to(x.device())};
}

// What at::convolution calls for devices that it does not know.
Tensor convolution(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, Sizes stride, Sizes padding,
                   Sizes dilation, bool transposed, Sizes output_padding, c10::SymInt groups) {
  if (weight.device() != x.device() || (bias && bias->defined() && bias->device() != x.device())) {
    throw std::runtime_error("mixed devices in convolution");
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return at::convolution(here(x), here(weight), here(bias), C10_AS_INTARRAYREF_SLOW(stride),
                         C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
                         C10_AS_INTARRAYREF_SLOW(output_padding), groups.expect_int())
      .to(x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& gradient, const Tensor& x, const Tensor& weight,
                                                        Sizes stride, Sizes padding, Sizes dilation, bool transposed,
                                                        Sizes output_padding, c10::SymInt groups,
                                                        std::array<bool, 3> wanted) {
  at::AutoDispatchBelowADInplaceOrView guard;
  const int64_t n_bias[] = {weight.size(0)};
  auto [of_x, of_weight, of_bias] = at::convolution_backward(
      here(gradient), here(x), here(weight), at::OptionalIntArrayRef(at::IntArrayRef(n_bias, 1)),
      C10_AS_INTARRAYREF_SLOW(stride), C10_AS_INTARRAYREF_SLOW(padding), C10_AS_INTARRAYREF_SLOW(dilation), transposed,
      C10_AS_INTARRAYREF_SLOW(output_padding), groups.expect_int(), wanted);
  auto back = [&](const Tensor& t) { return t.defined() ? t.to(x.device()) : t; };
  return {back(of_x), back(of_weight), back(of_bias)};
}

// As on a GPU: indices may lie on the host, and so does an optimizer's count of steps.
const std::set<std::string> TAKE_BOTH = {
    "aten::copy_", "aten::_to_copy", "aten::index", "aten::index_put_", "aten::_index_put_impl_",
    "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_"};

void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  bool far = false, on_host = false;
  auto look = [&](const Tensor& t) {
    if (!t.defined()) return;
    far |= !t.device().is_cpu();
    on_host |= t.device().is_cpu() && t.dim() > 0;  // a single number may come from anywhere
  };
  const auto n = op.schema().arguments().size();
  for (auto i = stack->size() - n; i < stack->size(); i++) {
    const auto& value = (*stack)[i];
    if (value.isTensor()) {
      look(value.toTensor());
    } else if (value.isTensorList()) {
      for (const Tensor& t : value.toTensorVector()) look(t);
    } else if (value.isOptionalTensorList()) {
      for (const auto& t : value.toOptionalTensorVector()) {
        if (t) look(*t);
      }
    }
  }
  if (far && on_host && !TAKE_BOTH.count(op.schema().name())) {
    throw std::runtime_error("mixed devices in " + op.schema().name());
  }
  at::native::cpu_fallback(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("resize_", resize);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("native_batch_norm", batch_norm);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>()); }
