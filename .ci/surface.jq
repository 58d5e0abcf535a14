# Of rustdoc's JSON: the crates, other than Rust's own, whose types or traits the public API names.
# What other crates implement for every type is none of ours, and the condition under which a pinned
# type is Unpin names nothing that a user could.
.paths as $paths
| .external_crates as $crates
| [
    .index[]
    | select((.span.filename // "") | startswith("src/"))
    | .inner
    | select(.impl.blanket_impl == null and (.impl.is_synthetic | not) and .impl.trait.path != "Unpin")
    | ..
    | objects
    | select(has("path") and .id != null)
    | $paths[.id | tostring]
    | select(. != null and .crate_id != 0)
    | $crates[.crate_id | tostring].name
  ]
| unique - ["alloc", "core", "std"]
| join(" ")
