/* RAPT_API marks what the shared library exports; everything else is hidden. */
#ifndef RAPT_EXPORT_H
#define RAPT_EXPORT_H

#if defined(RAPT_STATIC)
#define RAPT_API
#else
#define RAPT_API __attribute__((visibility("default")))
#endif

#endif
