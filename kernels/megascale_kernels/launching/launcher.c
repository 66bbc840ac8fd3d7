// SPDX-License-Identifier: Apache-2.0
// One launch of a compiled kernel with the copies that go before it, by the driver alone; or one product by cuBLAS.
//
// A `launch` is made once, from a block that holds every parameter of the kernel as it lies in memory. What differs
// between calls is written into the block: the addresses of the caller's tensors, in plain pointers and in tensor maps.
// Copies run on a stream of their own, each announced by a write of that stream into a peer's flag. They begin behind what
// the caller's stream has done so far, by an event, or, `gate`, when a word of memory tells that they may; then nothing
// stands between two kernels on the caller's stream, and a kernel that `follows` may be on its way while the one before
// ends (programmatic dependent launch: it waits for that end itself).
//
// A product is planned by `products.py`; here it is called with the plan. Launches and products in a row are one call.
//
// The driver's own header is the one that Triton's wheel brings; its functions are looked up in libcuda when they are
// needed first, so the module loads on a machine without a GPU.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_PARAMETERS = 96, MOST_MOVES = 16, MOST_SOURCES = 8, MAP_BYTES = 128, ALIGNMENT = 128, ALGORITHM_WORDS = 8,
       BIAS_POINTER = 8, SIGNATURE_BITS = 12 };

typedef struct {
  int source;       // which of the addresses of a call
  size_t offset;    // of the pointer or the map, in the block
  bool is_map;
  CUdeviceptr last; // what a map was last aimed at
} Move;

typedef struct {
  int source;       // which of the addresses of a call
  size_t first;     // bytes into it
  size_t bytes;
  CUdeviceptr target;
  CUdeviceptr flag; // where its arrival is announced; 0 announces nothing
} Copy;

typedef struct {
  int source;       // which of the addresses of a call
  size_t first;     // bytes into it
} Operand;

// cublasLtMatmul and cublasLtMatmulDescSetAttribute, of whichever version torch has loaded.
typedef int (*Multiply)(void *handle, void *description, const void *alpha, const void *a, void *a_layout, const void *b,
                        void *b_layout, const void *beta, const void *c, void *c_layout, void *out, void *out_layout,
                        const void *algorithm, void *scratch, size_t scratch_bytes, CUstream stream);
typedef int (*Describe)(void *description, int attribute, const void *value, size_t bytes);
typedef int (*Destroy)(void *made); // cublasLtMatmulDescDestroy, cublasLtMatrixLayoutDestroy

typedef struct {
  Multiply multiply;
  Describe describe;
  Destroy destroy_description, destroy_layout;
  void *handle, *description, *a_layout, *b_layout, *out_layout;
  Operand a, b, out;
  int bias; // which of the addresses of a call; -1 is none
  uint64_t algorithm[ALGORITHM_WORDS];
  void *scratch;
  size_t scratch_bytes;
} Product;

typedef struct {
  CUfunction function;
  unsigned grid, threads, shared;
  unsigned char *block; // aligned to ALIGNMENT, in `memory`
  void *memory;
  int parameters, moves, copies;
  void *places[MOST_PARAMETERS];
  bool here; // copies run on the caller's stream
  bool follows; // launched while the kernel before still runs
  CUdeviceptr gate; // copies begin when this word has come to the number of the launch before; 0: behind an event
  CUdeviceptr told; // where the stamp goes behind the last copy; 0: nowhere
  Move move[MOST_MOVES];
  Copy *copy;
  Product *product;
} Launch;

#define DRIVER(X)                                                                                                      \
  X(cuGetErrorName, CUresult, (CUresult, const char **))                                                               \
  X(cuTensorMapEncodeTiled, CUresult,                                                                                  \
    (CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *, const cuuint64_t *,                   \
     const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,        \
     CUtensorMapFloatOOBfill))                                                                                         \
  X(cuTensorMapReplaceAddress, CUresult, (CUtensorMap *, void *))                                                      \
  X(cuLaunchKernel, CUresult,                                                                                          \
    (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **))    \
  X(cuLaunchKernelEx, CUresult, (const CUlaunchConfig *, CUfunction, void **, void **))                               \
  X(cuMemcpyDtoDAsync_v2, CUresult, (CUdeviceptr, CUdeviceptr, size_t, CUstream))                                      \
  X(cuStreamWriteValue32_v2, CUresult, (CUstream, CUdeviceptr, cuuint32_t, unsigned))                                  \
  X(cuStreamWaitValue32_v2, CUresult, (CUstream, CUdeviceptr, cuuint32_t, unsigned))                                   \
  X(cuEventRecord, CUresult, (CUevent, CUstream))                                                                      \
  X(cuStreamWaitEvent, CUresult, (CUstream, CUevent, unsigned))

#define DECLARE(name, result, arguments) static result(*p_##name) arguments;
DRIVER(DECLARE)

static bool find_driver(void) {
  static bool found = false;
  if (found)
    return true;
  void *library = dlopen("libcuda.so.1", RTLD_LAZY);
  if (library == NULL) {
    PyErr_SetString(PyExc_OSError, "libcuda.so.1 cannot be loaded");
    return false;
  }
#define FIND(name, result, arguments)                                                                                  \
  p_##name = (result(*) arguments)dlsym(library, #name);                                                               \
  if (p_##name == NULL) {                                                                                              \
    PyErr_SetString(PyExc_OSError, "this driver has no " #name);                                                       \
    return false;                                                                                                      \
  }
  DRIVER(FIND)
  return found = true;
}

static bool went_well(CUresult result, const char *what) {
  if (result == CUDA_SUCCESS)
    return true;
  const char *name = NULL;
  if (p_cuGetErrorName(result, &name) != CUDA_SUCCESS || name == NULL)
    name = "an error without a name";
  PyErr_Format(PyExc_RuntimeError, "%s: %s (%d)", what, name, (int)result);
  return false;
}

static void forget(PyObject *capsule) {
  Launch *launch = PyCapsule_GetPointer(capsule, "launch");
  if (launch == NULL)
    return;
  free(launch->memory);
  free(launch->copy);
  if (launch->product != NULL) {
    const Product *product = launch->product;
    product->destroy_layout(product->out_layout);
    product->destroy_layout(product->b_layout);
    product->destroy_layout(product->a_layout);
    product->destroy_description(product->description);
  }
  free(launch->product);
  free(launch);
}

static bool read_places(Launch *launch, PyObject *offsets, size_t size) {
  launch->parameters = (int)PyTuple_GET_SIZE(offsets);
  if (launch->parameters > MOST_PARAMETERS) {
    PyErr_Format(PyExc_ValueError, "%d parameters, at most %d", launch->parameters, MOST_PARAMETERS);
    return false;
  }
  for (int i = 0; i < launch->parameters; i++) {
    size_t offset = PyLong_AsSize_t(PyTuple_GET_ITEM(offsets, i));
    if (PyErr_Occurred())
      return false;
    if (offset >= size) {
      PyErr_Format(PyExc_ValueError, "parameter %d begins at byte %zu of %zu", i, offset, size);
      return false;
    }
    launch->places[i] = launch->block + offset;
  }
  return true;
}

// moves: (source, offset, is_map)
static bool read_moves(Launch *launch, PyObject *moves, size_t size) {
  launch->moves = (int)PyTuple_GET_SIZE(moves);
  if (launch->moves > MOST_MOVES) {
    PyErr_Format(PyExc_ValueError, "%d addresses differ between calls, at most %d", launch->moves, MOST_MOVES);
    return false;
  }
  for (int i = 0; i < launch->moves; i++) {
    int source, is_map;
    Py_ssize_t offset;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(moves, i), "inp", &source, &offset, &is_map))
      return false;
    size_t bytes = is_map ? MAP_BYTES : sizeof(CUdeviceptr);
    if (source < 0 || source >= MOST_SOURCES || offset < 0 || (size_t)offset + bytes > size) {
      PyErr_Format(PyExc_ValueError, "source %d at byte %zd of %zu", source, offset, size);
      return false;
    }
    launch->move[i] = (Move){source, (size_t)offset, is_map, 0};
  }
  return true;
}

// maps: (offset, type, bytes of an element, swizzle, address, shape, strides in elements, box), outermost axis first
static bool encode_maps(Launch *launch, PyObject *maps, size_t size) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(maps); i++) {
    Py_ssize_t offset;
    int type, element, swizzle;
    unsigned long long address;
    PyObject *shape, *strides, *box;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(maps, i), "niiiKO!O!O!", &offset, &type, &element, &swizzle, &address,
                          &PyTuple_Type, &shape, &PyTuple_Type, &strides, &PyTuple_Type, &box))
      return false;
    int rank = (int)PyTuple_GET_SIZE(shape);
    if (rank < 1 || rank > 5 || PyTuple_GET_SIZE(strides) != rank || PyTuple_GET_SIZE(box) != rank || offset < 0 ||
        (size_t)offset + MAP_BYTES > size) {
      PyErr_SetString(PyExc_ValueError, "a tensor map has one to five axes and lies in the block");
      return false;
    }
    cuuint64_t sizes[5], steps[5];
    cuuint32_t boxes[5], ones[5] = {1, 1, 1, 1, 1};
    for (int axis = 0; axis < rank; axis++) { // the driver counts axes from the innermost
      sizes[rank - 1 - axis] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(shape, axis));
      boxes[rank - 1 - axis] = (cuuint32_t)PyLong_AsUnsignedLong(PyTuple_GET_ITEM(box, axis));
      if (axis < rank - 1)
        steps[rank - 2 - axis] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(strides, axis)) * (cuuint64_t)element;
    }
    if (PyErr_Occurred())
      return false;
    CUresult result = p_cuTensorMapEncodeTiled(
        (CUtensorMap *)(launch->block + offset), (CUtensorMapDataType)type, (cuuint32_t)rank, (void *)address, sizes,
        steps, boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, (CUtensorMapSwizzle)swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (!went_well(result, "a tensor map"))
      return false;
  }
  return true;
}

// copies: (bytes into a source, bytes, target, flag), and which source where it is not the first
static bool read_copies(Launch *launch, PyObject *copies) {
  launch->copies = (int)PyTuple_GET_SIZE(copies);
  launch->copy = calloc((size_t)launch->copies + 1, sizeof(Copy));
  if (launch->copy == NULL) {
    PyErr_NoMemory();
    return false;
  }
  for (int i = 0; i < launch->copies; i++) {
    unsigned long long first, bytes, target, flag;
    int source = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(copies, i), "KKKK|i", &first, &bytes, &target, &flag, &source))
      return false;
    if (source < 0 || source >= MOST_SOURCES) {
      PyErr_Format(PyExc_ValueError, "copy %d reads source %d of %d", i, source, MOST_SOURCES);
      return false;
    }
    launch->copy[i] = (Copy){source, (size_t)first, (size_t)bytes, (CUdeviceptr)target, (CUdeviceptr)flag};
  }
  return true;
}

static PyObject *make(PyObject *self, PyObject *args) {
  unsigned long long function;
  unsigned grid, threads, shared;
  Py_buffer block;
  PyObject *offsets, *moves, *maps, *copies;
  int here = 0, follows = 0;
  unsigned long long gate = 0, told = 0;
  if (!PyArg_ParseTuple(args, "KIIIy*O!O!O!O!|ppKK", &function, &grid, &threads, &shared, &block, &PyTuple_Type,
                        &offsets, &PyTuple_Type, &moves, &PyTuple_Type, &maps, &PyTuple_Type, &copies, &here, &follows,
                        &gate, &told))
    return NULL;
  PyObject *capsule = NULL;
  size_t size = (size_t)block.len;
  Launch *launch = find_driver() ? calloc(1, sizeof(Launch)) : NULL;
  if (launch == NULL) {
    if (!PyErr_Occurred())
      PyErr_NoMemory();
    goto done;
  }
  capsule = PyCapsule_New(launch, "launch", forget);
  if (capsule == NULL) {
    free(launch);
    goto done;
  }
  launch->function = (CUfunction)function;
  launch->grid = grid, launch->threads = threads, launch->shared = shared, launch->here = here;
  launch->follows = follows, launch->gate = (CUdeviceptr)gate, launch->told = (CUdeviceptr)told;
  launch->memory = malloc(size + ALIGNMENT);
  if (launch->memory == NULL) {
    PyErr_NoMemory();
    Py_CLEAR(capsule);
    goto done;
  }
  launch->block = (unsigned char *)(((uintptr_t)launch->memory + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT);
  memcpy(launch->block, block.buf, size);
  if (!read_places(launch, offsets, size) || !read_moves(launch, moves, size) || !encode_maps(launch, maps, size) ||
      !read_copies(launch, copies))
    Py_CLEAR(capsule);
done:
  PyBuffer_Release(&block);
  return capsule;
}

// product((multiply, describe, destroy a description, destroy a layout), handle, description, layouts of a, b and out, (source, first byte) of a, b and out, source
// of the bias or -1, algorithm, scratch, its bytes): description and layouts are its own from then on
static PyObject *product(PyObject *self, PyObject *args) {
  unsigned long long multiply, describe, destroy_description, destroy_layout, handle, description, a, b, out, scratch;
  Py_ssize_t first[3], scratch_bytes;
  int source[3], bias;
  Py_buffer algorithm;
  if (!PyArg_ParseTuple(args, "(KKKK)KK(KKK)(in)(in)(in)iy*Kn", &multiply, &describe, &destroy_description,
                        &destroy_layout, &handle, &description, &a, &b, &out, &source[0], &first[0], &source[1], &first[1], &source[2], &first[2], &bias, &algorithm, &scratch,
                        &scratch_bytes))
    return NULL;
  PyObject *capsule = NULL;
  bool fits = algorithm.len == sizeof(uint64_t) * ALGORITHM_WORDS && bias < MOST_SOURCES;
  for (int i = 0; i < 3; i++)
    fits = fits && source[i] >= 0 && source[i] < MOST_SOURCES && first[i] >= 0;
  if (!fits) {
    PyErr_Format(PyExc_ValueError, "a product reads sources 0 to %d and has an algorithm of %zu bytes", MOST_SOURCES - 1,
                 sizeof(uint64_t) * ALGORITHM_WORDS);
    goto done;
  }
  Launch *launch = calloc(1, sizeof(Launch));
  Product *made = calloc(1, sizeof(Product));
  if (launch == NULL || made == NULL || (capsule = PyCapsule_New(launch, "launch", forget)) == NULL) {
    free(launch);
    free(made);
    if (!PyErr_Occurred())
      PyErr_NoMemory();
    goto done;
  }
  *made = (Product){
      .multiply = (Multiply)(uintptr_t)multiply,
      .describe = (Describe)(uintptr_t)describe,
      .destroy_description = (Destroy)(uintptr_t)destroy_description,
      .destroy_layout = (Destroy)(uintptr_t)destroy_layout,
      .handle = (void *)handle,
      .description = (void *)description,
      .a_layout = (void *)a,
      .b_layout = (void *)b,
      .out_layout = (void *)out,
      .a = {source[0], (size_t)first[0]},
      .b = {source[1], (size_t)first[1]},
      .out = {source[2], (size_t)first[2]},
      .bias = bias,
      .scratch = (void *)scratch,
      .scratch_bytes = (size_t)scratch_bytes,
  };
  memcpy(made->algorithm, algorithm.buf, sizeof(made->algorithm));
  launch->product = made;
done:
  PyBuffer_Release(&algorithm);
  return capsule;
}

// The rest of a call beside what is launched.
typedef struct {
  CUstream stream, side;
  CUevent begun, copied;
  cuuint32_t stamp, number; // number: of the launch, whole
  bool behind;              // no gate
  CUdeviceptr sources[MOST_SOURCES];
} Call;

// What went wrong: a driver's function with its error, or a status of cuBLAS.
typedef struct {
  const char *what;
  CUresult result;
  int status;
} Outcome;

// The driver's function that failed is told by its name; called without the interpreter's lock.
static CUresult carry(const Launch *launch, const Call *call, const char **what) {
  CUresult result;
  CUstream side = launch->here ? call->stream : call->side;
  if (launch->gate != 0 && !call->behind) {
    // Compared by the difference of 32 bits: launches that open a gate come less than 2^31 launches after each other.
    *what = "cuStreamWaitValue32";
    if ((result = p_cuStreamWaitValue32_v2(side, launch->gate, call->number - 1, CU_STREAM_WAIT_VALUE_GEQ)) !=
        CUDA_SUCCESS)
      return result;
  } else if (!launch->here) {
    *what = "cuEventRecord";
    if ((result = p_cuEventRecord(call->begun, call->stream)) != CUDA_SUCCESS)
      return result;
    *what = "cuStreamWaitEvent";
    if ((result = p_cuStreamWaitEvent(side, call->begun, 0)) != CUDA_SUCCESS)
      return result;
  }
  for (int i = 0; i < launch->copies; i++) {
    const Copy *copy = &launch->copy[i];
    *what = "cuMemcpyDtoDAsync";
    CUdeviceptr source = call->sources[copy->source] + copy->first;
    if (copy->bytes != 0 && // a flag alone: there was nothing to copy
        (result = p_cuMemcpyDtoDAsync_v2(copy->target, source, copy->bytes, side)) != CUDA_SUCCESS)
      return result;
    *what = "cuStreamWriteValue32";
    if (copy->flag != 0 && (result = p_cuStreamWriteValue32_v2(side, copy->flag, call->stamp,
                                                               CU_STREAM_WRITE_VALUE_DEFAULT)) != CUDA_SUCCESS)
      return result;
  }
  *what = "cuStreamWriteValue32";
  if (launch->told != 0 && (result = p_cuStreamWriteValue32_v2(side, launch->told, call->stamp,
                                                               CU_STREAM_WRITE_VALUE_DEFAULT)) != CUDA_SUCCESS)
    return result;
  if (launch->here)
    return CUDA_SUCCESS;
  *what = "cuEventRecord";
  return p_cuEventRecord(call->copied, side);
}

static const void *at(const Call *call, Operand operand) {
  return (const void *)(uintptr_t)(call->sources[operand.source] + operand.first);
}

static int multiply(const Product *product, const Call *call) {
  const float one = 1.0F, zero = 0.0F;
  if (product->bias >= 0) {
    const void *bias = (const void *)(uintptr_t)call->sources[product->bias];
    int status = product->describe(product->description, BIAS_POINTER, &bias, sizeof(bias));
    if (status != 0)
      return status;
  }
  void *out = (void *)at(call, product->out);
  return product->multiply(product->handle, product->description, &one, at(call, product->a), product->a_layout,
                           at(call, product->b), product->b_layout, &zero, out, product->out_layout, out,
                           product->out_layout, product->algorithm, product->scratch, product->scratch_bytes,
                           call->stream);
}

// Write the addresses of a call where a kernel finds them.
static CUresult aim(Launch *launch, const Call *call) {
  for (int i = 0; i < launch->moves; i++) {
    Move *move = &launch->move[i];
    CUdeviceptr address = call->sources[move->source];
    if (!move->is_map) {
      memcpy(launch->block + move->offset, &address, sizeof(address));
    } else if (move->last != address) {
      CUresult result = p_cuTensorMapReplaceAddress((CUtensorMap *)(launch->block + move->offset), (void *)address);
      if (result != CUDA_SUCCESS)
        return result;
      move->last = address;
    }
  }
  return CUDA_SUCCESS;
}

static CUresult start(const Launch *launch, const Call *call) {
  if (!launch->follows)
    return p_cuLaunchKernel(launch->function, launch->grid, 1, 1, launch->threads, 1, 1, launch->shared, call->stream,
                            (void **)launch->places, NULL);
  CUlaunchAttribute follows = {.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION};
  follows.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig how = {
      .gridDimX = launch->grid,
      .gridDimY = 1,
      .gridDimZ = 1,
      .blockDimX = launch->threads,
      .blockDimY = 1,
      .blockDimZ = 1,
      .sharedMemBytes = launch->shared,
      .hStream = call->stream,
      .attrs = &follows,
      .numAttrs = 1,
  };
  return p_cuLaunchKernelEx(&how, launch->function, (void **)launch->places, NULL);
}

static Outcome go(Launch *launch, const Call *call) {
  Outcome outcome = {"a tensor map's address", CUDA_SUCCESS, 0};
  if ((outcome.result = aim(launch, call)) != CUDA_SUCCESS)
    return outcome;
  if (launch->copies > 0 && (outcome.result = carry(launch, call, &outcome.what)) != CUDA_SUCCESS)
    return outcome;
  if (launch->grid > 0) {
    outcome.what = "cuLaunchKernel";
    outcome.result = start(launch, call);
  }
  if (outcome.result == CUDA_SUCCESS && launch->product != NULL) {
    outcome.what = "cublasLtMatmul";
    outcome.status = multiply(launch->product, call);
  }
  return outcome;
}

enum { MOST_TOGETHER = 512, JOIN = 1, BEHIND = 2 };

// Launches one after another; returns how many, or -1 with the interpreter's error.
static Py_ssize_t read_launches(PyObject *made, Launch **launches) {
  Py_ssize_t count = PyTuple_Check(made) ? PyTuple_GET_SIZE(made) : 1;
  if (count > MOST_TOGETHER) {
    PyErr_Format(PyExc_ValueError, "%zd launches in one call, at most %d", count, MOST_TOGETHER);
    return -1;
  }
  for (Py_ssize_t i = 0; i < count; i++) {
    launches[i] = PyCapsule_GetPointer(PyTuple_Check(made) ? PyTuple_GET_ITEM(made, i) : made, "launch");
    if (launches[i] == NULL)
      return -1;
  }
  return count;
}

// launch(made, stream, side stream, event, event, stamp, join, addresses...), where the stamp is the number of the launch,
// whole, before twelve bits of signature, and `join` is a sum of JOIN and BEHIND: of each that was made, one or a tuple of
// them, copies first, then the kernel or the product. JOIN lets the stream wait for the copies that were made last, by
// this call or one before; BEHIND lets copies that have a gate wait for what the stream has done so far instead.
// Addresses left out are 0.
static PyObject *launch(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  if (count < 7 || count > 7 + MOST_SOURCES) {
    PyErr_Format(PyExc_TypeError, "launch takes 7 to %d arguments, not %zd", 7 + MOST_SOURCES, count);
    return NULL;
  }
  Launch *launches[MOST_TOGETHER];
  Py_ssize_t together = read_launches(args[0], launches);
  if (together < 0)
    return NULL;
  Call call = {
      .stream = (CUstream)PyLong_AsUnsignedLongLong(args[1]),
      .side = (CUstream)PyLong_AsUnsignedLongLong(args[2]),
      .begun = (CUevent)PyLong_AsUnsignedLongLong(args[3]),
      .copied = (CUevent)PyLong_AsUnsignedLongLong(args[4]),
  };
  unsigned long long stamp = PyLong_AsUnsignedLongLong(args[5]);
  call.stamp = (cuuint32_t)stamp, call.number = (cuuint32_t)(stamp >> SIGNATURE_BITS);
  long how = PyLong_AsLong(args[6]);
  bool join = (how & JOIN) != 0;
  call.behind = (how & BEHIND) != 0;
  for (int i = 0; i < count - 7; i++)
    call.sources[i] = (CUdeviceptr)PyLong_AsUnsignedLongLong(args[7 + i]);
  if (PyErr_Occurred() || (join && !find_driver()))
    return NULL;
  Outcome outcome = {"", CUDA_SUCCESS, 0};
  // A full queue blocks the driver's calls; other threads go on meanwhile.
  Py_BEGIN_ALLOW_THREADS;
  for (Py_ssize_t i = 0; i < together && outcome.result == CUDA_SUCCESS && outcome.status == 0; i++)
    outcome = go(launches[i], &call);
  if (outcome.result == CUDA_SUCCESS && outcome.status == 0 && join) {
    outcome.what = "cuStreamWaitEvent";
    outcome.result = p_cuStreamWaitEvent(call.stream, call.copied, 0);
  }
  Py_END_ALLOW_THREADS;
  if (outcome.status != 0) {
    PyErr_Format(PyExc_RuntimeError, "%s: status %d", outcome.what, outcome.status);
    return NULL;
  }
  if (!went_well(outcome.result, outcome.what))
    return NULL;
  Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"make", make, METH_VARARGS, "A launch from its parameters; see launch.py."},
    {"product", product, METH_VARARGS, "A product of cuBLAS's from its plan; see products.py."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "Copy, announce and launch."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, .m_name = "megascale_launcher", .m_size = -1, .m_methods = methods};

PyMODINIT_FUNC PyInit_megascale_launcher(void) { return PyModule_Create(&module); }
