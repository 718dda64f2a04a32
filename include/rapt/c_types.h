/* Types that all operations of the C interface share. Part of rapt.h. */
#ifndef RAPT_C_TYPES_H
#define RAPT_C_TYPES_H

#include <stddef.h>
#include <stdint.h>

/* The result of a call. rapt_last_error() has the message. */
typedef enum rapt_status {
  RAPT_OK = 0,
  RAPT_INVALID_ARGUMENT = 1, /* bad argument; rapt_last_error_argument() names it */
  RAPT_OUT_OF_MEMORY = 2,    /* an allocation failed; output tensors are unspecified */
  RAPT_INTERNAL_ERROR =
      3 /* what CUDA refuses, a bug in rapt, or an exception from a callback; output tensors are unspecified */
} rapt_status;

/* Element types: RAPT_F32 and so on; dtypes.def lists them. Shapes and strides of RAPT_I4X2 count bytes. Structures
 * store enumerations as int32_t, so that a wrong value is an error and never undefined behaviour. */
typedef enum rapt_dtype {
#define RAPT_DTYPE(name, NAME, value, text, bits, kind) RAPT_##NAME = value,
#include "rapt/dtypes.def"
} rapt_dtype;

/* Devices, with DLPack's codes. */
typedef enum rapt_device_type { RAPT_CPU = 1, RAPT_CUDA = 2 } rapt_device_type;

/* Instruction sets, named by feature: RAPT_ISA_GENERIC and so on; isas.def lists them. On one architecture a higher
 * value is a superset of a lower one. */
typedef enum rapt_isa {
#define RAPT_INSTRUCTION_SET(name, NAME, value) RAPT_ISA_##NAME = value,
#include "rapt/isas.def"
} rapt_isa;

/* Layouts of keys and values: RAPT_KV_STRIDED and so on. kv_kinds.def lists the tensors of each. */
typedef enum rapt_kv_kind {
#define RAPT_KV_KIND(name, NAME, value, text, positions) RAPT_KV_##NAME = value,
#include "rapt/kv_kinds.def"
} rapt_kv_kind;

/* Where query row 0 sits among the keys: row i of a sequence sits at key position i + offset. */
typedef enum rapt_align {
  RAPT_ALIGN_NONE = 0,         /* not given; an error where it is required (see rapt_attention_args) */
  RAPT_ALIGN_TOP_LEFT = 1,     /* offset 0 */
  RAPT_ALIGN_BOTTOM_RIGHT = 2, /* offset len_k - len_q of the sequence */
  RAPT_ALIGN_OFFSET = 3        /* offset align_offset */
} rapt_align;

/* A strided view of memory that the caller owns. All-zero means "no tensor given". Sizes and strides are in
 * elements, outermost dimension first. Strides are not negative; 0 repeats a dimension (inputs only). rapt only
 * reads inputs. */
typedef struct rapt_tensor {
  void* data;
  int32_t dtype;        /* rapt_dtype */
  int32_t device_type;  /* rapt_device_type; 0 means RAPT_CPU */
  int32_t device_index; /* 0 for the CPU */
  int32_t ndim;         /* 1 to 4; 0 only when no tensor is given */
  int64_t shape[4];
  int64_t strides[4];
} rapt_tensor;

#endif
