export default {
  render({ model, el }) {
    const inPanel = (element) => el.closest(".moelab-panel")?.contains(element);
    const keepKeys = ({ target, ctrlKey, altKey, metaKey }) => {
      if (inPanel(target)) target.toggleAttribute("data-lm-suppress-shortcuts", !(ctrlKey || altKey || metaKey));
    };
    const nameSlider = ({ target }) => {
      const label = inPanel(target) && target.closest(".widget-slider")?.querySelector(".widget-label");
      if (label) target.ariaLabel = label.textContent;
    };
    window.addEventListener("keydown", keepKeys, true);
    window.addEventListener("focusin", nameSlider, true);
    model.send({});
    return () => {
      window.removeEventListener("keydown", keepKeys, true);
      window.removeEventListener("focusin", nameSlider, true);
    };
  }
};
