// A copy in other colours. Text in bars keeps its own, as the bars keep theirs.
const painted = (value, colors, key) => {
  if (typeof value === "string")
    return colors[value] ?? (value.includes("color:") ? value.replace(/#[0-9a-f]{6}/gi, (one) => colors[one] ?? one) : value);
  if (!value || typeof value !== "object" || key === "textfont" || ArrayBuffer.isView(value)) return value;
  if (Array.isArray(value)) return typeof value.at(-1) === "number" ? value : value.map((one) => painted(one, colors));
  return Object.fromEntries(Object.entries(value).map(([name, one]) => [name, painted(one, colors, name)]));
};
